"""Triton: the largest logit of a row, one program a row, which keeps the best of each lane until the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _choose(logits, token_ids, finite, row_stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=2):
        column = start + lane
        x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
        odd = odd | ((column < vocab) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        larger = x > best
        best = tl.where(larger, x, best)
        place = tl.where(larger, column, place)
    largest = tl.max(best, 0)
    # The first of equals: a lane keeps its first, so the lowest of the lanes' places is the row's.
    token = tl.min(tl.where(best == largest, place, vocab - 1), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(finite + row, (tl.sum(odd, 0) == 0).to(tl.int8))


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.greedy_choice`."""
    num_rows, vocab = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        _choose[(num_rows,)](
            logits, token_ids, finite.view(torch.int8), logits.stride(0), vocab, BLOCK=block, num_warps=16
        )
    return token_ids, finite
