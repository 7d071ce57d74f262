"""The end of a decode step of one token a row: its tokens are remembered and handed to the host, one launch.

token_ids [T] int64, finite [T] bool: whether a row's logits are; slots [T] int64, no slot twice but the one of padding;
last_tokens [S] int64; kept [2, M] int64; results [R, 2, M] int64; turn [1] int64 -> nothing. Changed in place:
last_tokens[slots] = token_ids; of the first T places of `kept`, the tokens and the slots; of entry turn % R of the
results, the tokens, and 1 where the logits are finite, else 0; turn is one more. `results` may be page-locked memory of
the host.
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
    name: str
    num_rows: int
    num_slots: int
    room: int = 16
    turn: int = 5


CASES = (
    Case("one_row", 1, 2),
    Case("rows", 9, 20, turn=3),
    Case("whole_entry", 16, 20, turn=2**33),
    Case("many_rows", 300, 310, room=320),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random tokens, some of them of logits that are not finite."""
    g = torch.Generator().manual_seed(case.num_rows)
    return {
        "token_ids": torch.randint(0, 1000, (case.num_rows,), generator=g),
        "finite": torch.rand(case.num_rows, generator=g) < 0.7,
        "slots": torch.randperm(case.num_slots, generator=g)[: case.num_rows],
        "last_tokens": torch.randint(0, 1000, (case.num_slots,), generator=g),
        "kept": torch.randint(0, 1000, (2, case.room), generator=g),
        "results": torch.randint(0, 1000, (4, 2, case.room), generator=g),
        "turn": torch.tensor([case.turn]),
    }


def reference(
    token_ids: Tensor, finite: Tensor, slots: Tensor, last_tokens: Tensor, kept: Tensor, results: Tensor, turn: Tensor
) -> None:
    """The contract, row by row."""
    entry = results[int(turn) % len(results)]
    for row, (token, is_finite, slot) in enumerate(zip(token_ids, finite, slots, strict=True)):
        last_tokens[slot] = token
        kept[0, row], kept[1, row] = token, slot
        entry[0, row], entry[1, row] = token, int(is_finite)
    turn += 1


OP = Op("decode_results", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    token_ids: Tensor, finite: Tensor, slots: Tensor, last_tokens: Tensor, kept: Tensor, results: Tensor, turn: Tensor
) -> None:
    last_tokens[slots] = token_ids
    kept[:, : len(token_ids)] = torch.stack([token_ids, slots])
    results[turn % len(results), :, : len(token_ids)] = torch.stack([token_ids, finite.long()])
    turn += 1


@OP.backend("triton", needs=TRITON)
def _triton(
    token_ids: Tensor, finite: Tensor, slots: Tensor, last_tokens: Tensor, kept: Tensor, results: Tensor, turn: Tensor
) -> None:
    from baleen_kernels.own import decode_steps as own

    own.keep(token_ids, finite, slots, last_tokens, kept, results, turn)


def decode_results(
    token_ids: Tensor,
    finite: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    kept: Tensor,
    results: Tensor,
    turn: Tensor,
    *,
    backend: str = "torch",
) -> None:
    """See the module docstring."""
    OP.pick(backend)(token_ids, finite, slots, last_tokens, kept, results, turn)
