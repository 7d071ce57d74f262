"""What a decode step of one token a row reads, made of what its rows are: one launch in front of the first layer.

slots, positions, given [T] int64: each row's slot, where its token sits, and the token, or -1 for the one that its slot
sampled last. last_tokens [S] int64; tables [S, P] int32: the pages of each slot, of `page_size` places each, a power of
two -> token_ids [T] int64; kv_slots [T] int64: the place of each token in the pools; lengths [T] int32: keys that it
sees, itself among them; row_tables [T, P] int32: the row of `tables` of its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

GIVEN_BY_SLOT = -1


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_rows: int
    num_slots: int
    num_pages: int
    page_size: int = 64


CASES = (
    Case("one_row", 1, 2, 5),
    Case("rows", 9, 20, 40),
    Case("many_pages", 3, 4, 2_560),
    Case("small_pages", 4, 4, 7, page_size=16),
    Case("no_rows", 0, 2, 5),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random places; some tokens are given."""
    g = torch.Generator().manual_seed(case.num_rows)
    positions = torch.randint(0, case.num_pages * case.page_size, (case.num_rows,), generator=g)
    given = torch.randint(0, 1000, (case.num_rows,), generator=g)
    return {
        "slots": torch.randint(0, case.num_slots, (case.num_rows,), generator=g),
        "positions": positions,
        "given": given.masked_fill(positions % 2 == 0, GIVEN_BY_SLOT),
        "last_tokens": torch.randint(0, 1000, (case.num_slots,), generator=g),
        "tables": torch.randint(0, 10**6, (case.num_slots, case.num_pages), generator=g).int(),
        "page_size": case.page_size,
    }


def reference(
    slots: Tensor, positions: Tensor, given: Tensor, last_tokens: Tensor, tables: Tensor, *, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The contract, row by row."""
    token_ids, kv_slots = torch.empty_like(slots), torch.empty_like(slots)
    for row, (slot, position, token) in enumerate(zip(slots, positions, given, strict=True)):
        token_ids[row] = last_tokens[slot] if token == GIVEN_BY_SLOT else token
        kv_slots[row] = tables[slot, position // page_size].long() * page_size + position % page_size
    return token_ids, kv_slots, (positions + 1).int(), tables[slots]


OP = Op("decode_inputs", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    slots: Tensor, positions: Tensor, given: Tensor, last_tokens: Tensor, tables: Tensor, *, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_tables = tables[slots]
    pages = row_tables.gather(1, (positions // page_size)[:, None])[:, 0].long()
    token_ids = torch.where(given == GIVEN_BY_SLOT, last_tokens[slots], given)
    return token_ids, pages * page_size + positions % page_size, (positions + 1).int(), row_tables


@OP.backend("triton", needs=TRITON)
def _triton(
    slots: Tensor, positions: Tensor, given: Tensor, last_tokens: Tensor, tables: Tensor, *, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from baleen_kernels.own import decode_inputs as own

    return own.prepare(slots, positions, given, last_tokens, tables, page_size=page_size)


def decode_inputs(
    slots: Tensor,
    positions: Tensor,
    given: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    *,
    page_size: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(slots, positions, given, last_tokens, tables, page_size=page_size)
