"""Launches indexer_prep.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baleen_kernels.own import build

_HEADS = 8  # of a warp at a time
# Tokens up to which a warp takes eight heads once; beyond, so many times eight that loads of the next are on their way.
_FEW = 512
_MOST_TURNS = 4


def turns_of(num_tokens: int, num_heads: int) -> int:
    """How many times eight heads of a token one warp takes."""
    turns = 1
    while num_tokens > _FEW and turns < _MOST_TURNS and num_heads % (2 * turns * _HEADS) == 0:
        turns *= 2
    return turns


def prepare(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.indexer_prep`."""
    num_tokens, heads, width = q.shape
    values = torch.empty(num_tokens, heads, width, dtype=torch.float8_e4m3fn, device=q.device)
    weights = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
    for tensor in (norm_weight, norm_bias, cos_sin, positions, slots, pages):
        assert tensor.is_contiguous()
    assert heads == 0 or q.stride(1) == width
    if num_tokens:
        tensors = q, k, head_weights, norm_weight, norm_bias, cos_sin, positions, slots, pages, values, weights
        strides = q.stride(0), k.stride(0), head_weights.stride(0)
        code = build.load("indexer_prep").baleen_indexer_prep(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            *(ctypes.c_int64(stride) for stride in strides),
            ctypes.c_float((max(heads, 1) * width) ** -0.5),
            ctypes.c_float(eps),
            num_tokens,
            heads,
            turns_of(num_tokens, heads),
            int(scale_ue8m0),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        build.check(code, "indexer_prep")
    return values, weights
