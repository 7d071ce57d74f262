"""What a decode step of one token a row reads, made of what its rows are: one launch in front of the first layer.

The host leaves a step's rows in the next entry of a ring, so that nothing waits for a step that still reads its own;
how many steps there were is counted on the device, by `decode_results`.

given [R, 3, M] int64: in entry turn % R the rows' slots, where their tokens sit, and the tokens, or -1 for the one
that the slot sampled last; turn [1] int64; last_tokens [S] int64; tables [S, P] int32: the pages of each slot, of
`page_size` places each, a power of two -> of the entry's first T rows: slots, positions, token_ids [T] int64; kv_slots
[T] int64: the place of each token in the pools; lengths [T] int32: keys that it sees, itself among them; row_tables
[T, P] int32: the row of `tables` of its slot. `given` may be page-locked memory of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

GIVEN_BY_SLOT = -1
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_rows: int
    num_slots: int
    num_pages: int
    page_size: int = 64
    room: int = 16
    turn: int = 5


CASES = (
    Case("one_row", 1, 2, 5),
    Case("rows", 9, 20, 40, turn=3),
    Case("whole_entry", 16, 20, 40, turn=2**33),
    Case("many_pages", 3, 4, 2_560),
    Case("small_pages", 4, 4, 7, page_size=16),
    Case("no_rows", 0, 2, 5),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random places; some tokens are given."""
    g = torch.Generator().manual_seed(case.num_rows)
    shape = 4, max(case.room, case.num_rows)
    positions = torch.randint(0, case.num_pages * case.page_size, shape, generator=g)
    tokens = torch.randint(0, 1000, shape, generator=g).masked_fill(positions % 2 == 0, GIVEN_BY_SLOT)
    return {
        "given": torch.stack([torch.randint(0, case.num_slots, shape, generator=g), positions, tokens], 1),
        "turn": torch.tensor([case.turn]),
        "last_tokens": torch.randint(0, 1000, (case.num_slots,), generator=g),
        "tables": torch.randint(0, 10**6, (case.num_slots, case.num_pages), generator=g).int(),
        "num_rows": case.num_rows,
        "page_size": case.page_size,
    }


def reference(
    given: Tensor, turn: Tensor, last_tokens: Tensor, tables: Tensor, *, num_rows: int, page_size: int
) -> Inputs:
    """The contract, row by row."""
    slots, positions, tokens = given[int(turn) % len(given), :, :num_rows].clone()
    token_ids, kv_slots = torch.empty_like(slots), torch.empty_like(slots)
    for row, (slot, position, token) in enumerate(zip(slots, positions, tokens, strict=True)):
        token_ids[row] = last_tokens[slot] if token == GIVEN_BY_SLOT else token
        kv_slots[row] = tables[slot, position // page_size].long() * page_size + position % page_size
    return slots, positions, token_ids, kv_slots, (positions + 1).int(), tables[slots]


OP = Op("decode_inputs", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    given: Tensor, turn: Tensor, last_tokens: Tensor, tables: Tensor, *, num_rows: int, page_size: int
) -> Inputs:
    slots, positions, tokens = given.index_select(0, turn % len(given))[0, :, :num_rows]
    row_tables = tables[slots]
    pages = row_tables.gather(1, (positions // page_size)[:, None])[:, 0].long()
    token_ids = torch.where(tokens == GIVEN_BY_SLOT, last_tokens[slots], tokens)
    return slots, positions, token_ids, pages * page_size + positions % page_size, (positions + 1).int(), row_tables


@OP.backend("triton", needs=TRITON)
def _triton(
    given: Tensor, turn: Tensor, last_tokens: Tensor, tables: Tensor, *, num_rows: int, page_size: int
) -> Inputs:
    from baleen_kernels.own import decode_steps as own

    return own.prepare(given, turn, last_tokens, tables, num_rows=num_rows, page_size=page_size)


def decode_inputs(
    given: Tensor,
    turn: Tensor,
    last_tokens: Tensor,
    tables: Tensor,
    *,
    num_rows: int,
    page_size: int,
    backend: str = "torch",
) -> Inputs:
    """See the module docstring."""
    return OP.pick(backend)(given, turn, last_tokens, tables, num_rows=num_rows, page_size=page_size)
