"""The largest logit of each row, and whether all of them are numbers, in one pass.

logits [T, V] float32, V at least 1 -> token_ids [T] int64, the first of equals, finite [T] bool: no logit is NaN or
infinite. Where one is, token_ids is some number from 0 to V - 1 that means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Case:
    """`levels` > 0 rounds logits, which makes ties. `odd`: a number that is planted in every second row."""

    name: str
    num_rows: int
    vocab: int
    levels: int = 0
    odd: float | None = None


CASES = (
    Case("released", 2, 129_280),
    Case("ties", 5, 40_000, levels=3),
    Case("narrow", 3, 100),
    Case("one_word", 2, 1),
    Case("nan", 4, 20_000, odd=float("nan")),
    Case("infinite", 4, 5_000, odd=float("inf")),
    Case("minus_infinite", 4, 5_000, odd=float("-inf")),
    Case("no_rows", 0, 100),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random logits."""
    g = torch.Generator().manual_seed(case.vocab)
    logits = torch.randn(case.num_rows, case.vocab, generator=g)
    if case.levels:
        logits = torch.randint(0, case.levels, logits.shape, generator=g).float()
    if case.odd is not None:
        logits[::2, case.vocab // 3] = case.odd
    return {"logits": logits}


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The contract, row by row."""
    tokens = [row.index(max(row)) for row in logits.nan_to_num().tolist()]
    finite = [bool(row.isfinite().all()) for row in logits]
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor(finite, dtype=torch.bool)


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    del inputs
    tokens, finite, *rest = outputs
    return [tokens.masked_fill(~finite, 0), finite, *rest]


OP = Op("greedy_choice", reference, CASES, make_inputs, atol=0, rtol=0, canonical=canonical)


@OP.backend("torch")
def _torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.argmax(-1), logits.isfinite().all(-1)


def _rejects_gaps(logits: Tensor) -> str | None:
    return None if logits.stride(1) == 1 else "the logits of a row must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_gaps)
def _triton(logits: Tensor) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import greedy_choice as own

    return own.choose(logits)


def greedy_choice(logits: Tensor, *, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(logits)
