"""The ring in which the host and decode graphs meet: entries, padding, who waits for whom. On a CPU, on PyTorch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.decode_inputs import GIVEN_BY_SLOT, decode_inputs
from baleen_kernels.decode_results import decode_results
from baleen_worker.decode_exchange import DecodeExchange
from baleen_worker.step import PlannedRow

if TYPE_CHECKING:
    from torch import Tensor

MOST, SPARE = 4, 5


class Arrivals:
    """Results whose waits are counted."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def _row(slot: int, start: int, *token_ids: int) -> PlannedRow:
    return PlannedRow(
        slot=slot,
        start=start,
        token_ids=token_ids,
        first_new_page=0,
        new_pages=[],
        sample=True,
        output_index=1,
        from_device=not token_ids,
    )


class Steps:
    """Steps that choose 100 + the number of the step for every row; the device's side of the exchange."""

    def __init__(self) -> None:
        self.exchange = DecodeExchange(MOST, SPARE, torch.device("cpu"))
        self.last_tokens = torch.arange(SPARE + 1)
        self.kept = torch.zeros(2, MOST, dtype=torch.int64)
        self.tables = torch.arange(SPARE + 1, dtype=torch.int32)[:, None].repeat(1, 4)
        self.number = 0

    def run(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """-> slots, positions, token ids as the step saw them."""
        exchange = self.exchange
        ring = exchange.given, exchange.turn
        seen = decode_inputs(*ring, self.last_tokens, self.tables, num_rows=size, page_size=64)
        token_ids = torch.full((size,), 100 + self.number)
        finite = torch.ones(size, dtype=torch.bool)
        decode_results(token_ids, finite, seen[0], self.last_tokens, self.kept, exchange.results, exchange.turn)
        self.number += 1
        return seen[0], seen[1], seen[2]


def test_a_step_sees_its_rows_and_padding() -> None:
    steps = Steps()
    steps.exchange.give([_row(2, 70), _row(0, 9, 33)], 3)
    slots, positions, token_ids = steps.run(3)
    assert (slots.tolist(), positions.tolist()) == ([2, 0, SPARE], [70, 9, 0])
    assert token_ids.tolist() == [2, 33, 0]  # what the slot sampled last, what was given, and padding's
    assert GIVEN_BY_SLOT == -1


def test_results_stay_while_other_steps_run() -> None:
    steps = Steps()
    told: list[Tensor] = []
    for start in range(20):
        steps.exchange.give([_row(1, start)], 1)
        slots, positions, token_ids = steps.run(1)
        assert (slots.tolist(), positions.tolist()) == ([1], [start])
        assert token_ids.tolist() == [1 if start == 0 else 99 + start]  # of the step before
        told.append(steps.exchange.results_of_last(1)[0])
    assert [tokens.tolist() for tokens in told] == [[100 + number] for number in range(20)]


def test_an_entry_is_written_again_when_its_results_have_come() -> None:
    steps = Steps()
    arrivals = [Arrivals() for _ in range(9)]
    for number, arrival in enumerate(arrivals):
        steps.exchange.give([_row(1, number)], 1)
        steps.run(1)
        steps.exchange.until(arrival)
    assert [arrival.waits for arrival in arrivals] == [1, *[0] * 8]


def test_a_rehearsal_is_padding_and_does_not_count() -> None:
    steps = Steps()
    steps.exchange.give([_row(1, 5)], 1)
    steps.run(1)
    before = steps.exchange.results_of_last(1)[0]
    with steps.exchange.rehearsal():
        for _ in range(3):
            slots, positions, _ = steps.run(2)
            assert (slots.tolist(), positions.tolist()) == ([SPARE, SPARE], [0, 0])
    assert before.tolist() == [100]
    steps.exchange.give([_row(3, 64)], 1)
    assert steps.run(1)[1].tolist() == [64]
    assert steps.exchange.results_of_last(1)[0].tolist() == [104]


def test_a_step_that_never_ran_does_not_leave_its_rows_to_the_next() -> None:
    steps = Steps()
    steps.exchange.give([_row(1, 5)], 1)
    steps.exchange.agree()
    steps.exchange.give([_row(2, 7)], 1)
    slots, positions, _ = steps.run(1)
    assert (slots.tolist(), positions.tolist()) == ([2], [7])
    assert steps.exchange.results_of_last(1)[0].tolist() == [100]
