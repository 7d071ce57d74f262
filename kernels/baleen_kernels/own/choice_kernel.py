"""Launches moe_choose.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baleen_kernels.own import build


def choose(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
    num_tiles: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, E] -> the rest as in `baleen_kernels.moe_choose`."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    assert bias.is_contiguous()
    weights = torch.empty(num_tokens, topk + 1, dtype=torch.float32, device=logits.device)
    tile_expert = torch.empty(num_tiles, dtype=torch.int32, device=logits.device)
    tile_picks = torch.empty(num_tiles, 16, dtype=torch.int32, device=logits.device)
    tensors = logits, bias, weights, tile_expert, tile_picks
    code = build.load("moe_choose").baleen_moe_choose(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_float(scaling_factor),
        num_tokens,
        num_tiles,
        num_experts,
        num_groups,
        topk_groups,
        topk,
        int(normalize),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    build.check(code, "moe_choose")
    return weights, tile_expert, tile_picks
