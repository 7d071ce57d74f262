"""Triton: attention over parts of a selection: queries for each part, and results put together by log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import narrow


@triton.jit
def _merge(parts, lse, out, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)
    row = token * PARTS * NUM_HEADS + head
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        # A part without any key has no finite one.
        value = tl.load(lse + row + part * NUM_HEADS)
        largest = tl.maximum(largest, tl.where(tl.abs(value) < float("inf"), value, float("-inf")))
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros((HEADS, WIDTH), tl.float32)
    weights = tl.zeros((HEADS,), tl.float32)
    for part in tl.static_range(PARTS):
        value = tl.load(lse + row + part * NUM_HEADS)
        weight = tl.where(tl.abs(value) < float("inf"), tl.exp(value - anchor), 0.0)
        place = (row + part * NUM_HEADS)[:, None] * WIDTH + channel[None, :]
        total += weight[:, None] * tl.load(parts + place).to(tl.float32)
        weights += weight
    result = tl.where(weights > 0.0, 1.0 / weights, 0.0)[:, None] * total
    tl.store(out + (token * NUM_HEADS + head)[:, None] * WIDTH + channel[None, :], narrow(result, out.dtype.element_ty))


def merge(parts: Tensor, lse: Tensor) -> Tensor:
    """Contract and shapes as in `baleen_kernels.merge_parts`."""
    num_tokens, num_parts, num_heads, width = parts.shape
    out = torch.empty(num_tokens, num_heads, width, dtype=parts.dtype, device=parts.device)
    if num_tokens:
        heads = next(heads for heads in (4, 2, 1) if num_heads % heads == 0)
        _merge[(num_tokens, num_heads // heads)](
            parts, lse, out, NUM_HEADS=num_heads, WIDTH=width, PARTS=num_parts, HEADS=heads, num_warps=4
        )
    return out


@triton.jit
def _repeat(x, out, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * width + column, mask=column < width)
    for part in tl.static_range(PARTS):
        tl.store(out + (token * PARTS + part) * width + column, value, mask=column < width)


def repeat(x: Tensor, times: int) -> Tensor:
    """x [T, ...] -> [T * times, ...], each row `times` times in a row. A single row is not copied."""
    if x.shape[0] == 1:
        return x.expand(times, *x.shape[1:])
    assert x.is_contiguous()
    num_rows, width = x.shape[0], x[0].numel()
    out = torch.empty(num_rows * times, *x.shape[1:], dtype=x.dtype, device=x.device)
    block = 2048
    _repeat[(num_rows, triton.cdiv(width, block))](x, out, width, PARTS=times, BLOCK=block, num_warps=4)
    return out
