"""Launches topk_slots.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baleen_kernels.own import build


def launch(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor | None,
    table_rows: Tensor | None,
    starts: Tensor | None,
    out: Tensor,
    *,
    cluster: int,
) -> None:
    """Contract and shapes as in `baleen_kernels.topk_slots`; `cluster` blocks share a row."""

    def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
        if tensor is None:
            return ctypes.c_void_p(None)
        assert tensor.dtype in (torch.int32, torch.float32), tensor.dtype
        return ctypes.c_void_p(tensor.data_ptr())

    num_rows, width = scores.shape
    code = build.load("topk_slots").baleen_topk_slots(
        pointer(scores),
        ctypes.c_int64(scores.stride(0)),
        pointer(starts),
        pointer(lengths),
        pointer(page_tables),
        ctypes.c_int64(0 if page_tables is None else page_tables.stride(0)),
        pointer(table_rows),
        pointer(out),
        num_rows,
        width,
        out.shape[1],
        cluster,
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    build.check(code, "topk_slots")
