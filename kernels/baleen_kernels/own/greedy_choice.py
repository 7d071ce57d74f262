"""Triton: the largest logit of a row. Programs take parts of a row, each lane of one keeps its best; a second launch
settles the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_MOST_PARTS = 32  # of a row


@triton.jit
def _best_of_part(logits, best, places, odd, row_stride, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), vocab - 1, tl.int32)
    not_finite = tl.zeros((BLOCK,), tl.int32)
    for start in range(part * BLOCK, vocab, PARTS * BLOCK):
        column = start + lane
        x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
        not_finite = not_finite | ((column < vocab) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        larger = x > largest
        largest = tl.where(larger, x, largest)
        place = tl.where(larger, column, place)
    value = tl.max(largest, 0)
    # The first of equals: a lane keeps its first, so the lowest of the lanes' places is the part's.
    tl.store(best + row * PARTS + part, value)
    tl.store(places + row * PARTS + part, tl.min(tl.where(largest == value, place, vocab - 1), 0))
    tl.store(odd + row * PARTS + part, tl.max(not_finite, 0))


@triton.jit
def _settle(best, places, odd, token_ids, finite, vocab, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = row * PARTS + tl.arange(0, PARTS)
    value = tl.load(best + part)
    place = tl.where(value == tl.max(value, 0), tl.load(places + part), vocab - 1)
    tl.store(token_ids + row, tl.min(place, 0).to(tl.int64))
    tl.store(finite + row, (tl.max(tl.load(odd + part), 0) == 0).to(tl.int8))


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.greedy_choice`."""
    num_rows, vocab = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        parts = min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
        best = torch.empty(num_rows, parts, dtype=torch.float32, device=device)
        places, odd = torch.empty(2, num_rows, parts, dtype=torch.int32, device=device)
        stride = logits.stride(0)
        _best_of_part[(num_rows, parts)](
            logits, best, places, odd, stride, vocab, PARTS=parts, BLOCK=_BLOCK, num_warps=8
        )
        _settle[(num_rows,)](best, places, odd, token_ids, finite.view(torch.int8), vocab, PARTS=parts, num_warps=1)
    return token_ids, finite
