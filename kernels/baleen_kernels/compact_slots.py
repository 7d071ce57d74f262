"""Selections with their gaps closed, for kernels that take a count of slots instead of gaps among them.

slots [T, K] int32, -1 for none, in any place -> slots [T, K] int32, each row's others in their order, then zeros, which
nobody may read but which are slots; and their counts [T] int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import ANY_TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`gaps`: share of slots that are not there."""

    name: str
    num_tokens: int
    topk: int
    gaps: float


CASES = (
    Case("some", 3, 2048, 0.3),
    Case("all_there", 2, 64, 0.0),
    Case("nothing", 2, 64, 1.0),
    Case("odd_width", 5, 100, 0.5),
    Case("one_slot", 4, 1, 0.5),
    Case("no_tokens", 0, 64, 0.5),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random slots."""
    g = torch.Generator().manual_seed(case.topk)
    slots = torch.randint(0, 1 << 20, (case.num_tokens, case.topk), generator=g, dtype=torch.int32)
    return {"slots": slots.masked_fill(torch.rand(slots.shape, generator=g) < case.gaps, -1)}


def reference(slots: Tensor) -> tuple[Tensor, Tensor]:
    """The contract, row by row."""
    rows = [[slot for slot in row if slot >= 0] for row in slots.tolist()]
    packed = [row + [0] * (slots.shape[1] - len(row)) for row in rows]
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return torch.tensor(packed, dtype=torch.int32).view_as(slots), counts


OP = Op("compact_slots", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(slots: Tensor) -> tuple[Tensor, Tensor]:
    present = slots >= 0
    order = (~present).sort(stable=True, dim=-1).indices
    return slots.gather(1, order).clamp(min=0), present.sum(-1, dtype=torch.int32)


def _rejects_triton(slots: Tensor) -> str | None:
    return None if slots.is_contiguous() else "slots must be contiguous"


@OP.backend("triton", needs=ANY_TRITON, rejects=_rejects_triton)
def _triton(slots: Tensor) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import compact_slots as own

    return own.compact(slots)


def compact_slots(slots: Tensor, *, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(slots)
