"""Triton: selections with their gaps closed, a row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["topk"])
def _compact(slots, packed, counts, topk, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    slot = tl.load(slots + row * topk + column, mask=column < topk, other=-1)
    present = (slot >= 0).to(tl.int32)
    place = tl.cumsum(present, 0) - present
    count = tl.sum(present, 0)
    # Two stores to different places: what is there in order, and a slot that exists behind it.
    tl.store(packed + row * topk + place, slot, mask=present > 0)
    tl.store(packed + row * topk + column, tl.zeros_like(slot), mask=(column >= count) & (column < topk))
    tl.store(counts + row, count)


def compact(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.compact_slots`."""
    num_tokens, topk = slots.shape
    packed, counts = torch.empty_like(slots), torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
    if num_tokens:
        _compact[(num_tokens,)](slots, packed, counts, topk, WIDTH=triton.next_power_of_2(topk), num_warps=8)
    return packed, counts
