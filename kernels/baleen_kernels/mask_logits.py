"""Forbids the tokens that rows' grammars leave out: their logits become -inf.

logits [T, V] float32, changed in place; rows [N] int64, no row twice; masks [N, ceil(V / 32)] int32: bit v % 32 of
number v // 32 is set where token v is allowed. Bits beyond V mean nothing. Other rows are left alone, and so is what is
allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`masked`: rows that have a mask."""

    name: str
    num_rows: int
    vocab: int
    masked: tuple[int, ...]


CASES = (
    Case("some_rows", 5, 2_048, (3, 0, 4)),
    Case("released", 2, 129_280, (1, 0)),
    Case("odd_vocabulary", 3, 1_001, (0, 2)),
    Case("narrow", 2, 7, (1,)),
    Case("no_masks", 2, 100, ()),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random logits and masks; NaN and infinities stay what they are where they are allowed."""
    g = torch.Generator().manual_seed(case.vocab)
    logits = torch.randn(case.num_rows, case.vocab, generator=g)
    logits[:, ::5] = torch.nan
    logits[:, 1::5] = -torch.inf
    words = -(-case.vocab // 32)
    return {
        "logits": logits,
        "rows": torch.tensor(case.masked, dtype=torch.int64),
        "masks": torch.randint(-(2**31), 2**31 - 1, (len(case.masked), words), generator=g, dtype=torch.int32),
    }


def reference(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """The contract, row by row."""
    for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
        allowed = [mask[v // 32] >> (v % 32) & 1 for v in range(logits.shape[1])]
        logits[row, torch.tensor(allowed) == 0] = -torch.inf


OP = Op("mask_logits", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def _rejects_gaps(logits: Tensor, **_: Any) -> str | None:
    return None if logits.stride(1) == 1 else "the logits of a row must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_gaps)
def _triton(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    from baleen_kernels.own import mask_logits as own

    own.forbid(logits, rows, masks)


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor, *, backend: str = "torch") -> None:
    """See the module docstring."""
    OP.pick(backend)(logits, rows, masks)
