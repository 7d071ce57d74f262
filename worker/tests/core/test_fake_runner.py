"""The fake runner finds every fault that it exists to find: one test a fault, each of them seen on a healthy plan."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from baleen_worker.fake_runner import FakeRunner, expected_tokens
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, PlannedRow, StepOutput, StepPlan
from engine_rig import VOCAB_SIZE

PROMPT = [5] * 100
SAMPLING = SamplingParams(max_tokens=50, seed=0)


class Driver:
    """Feeds one runner by hand, as a scheduler would."""

    def __init__(self) -> None:
        self.runner = FakeRunner(12, VOCAB_SIZE)
        self.step = 0

    def run(self, *rows: PlannedRow, admit: tuple[int, ...] = ()) -> StepOutput:
        self.step += 1
        plan = StepPlan(self.step, [Admission(slot, SAMPLING) for slot in admit], rows)
        return self.runner.launch(plan).collect()

    def prefill(self, slot: int, pages: list[int]) -> int:
        """The whole prompt in one row; returns the first token."""
        output = self.run(PlannedRow(slot, 0, PROMPT, 0, pages, True, 0), admit=(slot,))
        assert not output.errors
        return output.token_ids[0][0]


def decode(slot: int, index: int, token: int, new_pages: tuple[int, ...] = ()) -> PlannedRow:
    """The row that feeds output `index` and asks for the next one."""
    return PlannedRow(slot, len(PROMPT) + index, [token], 2, new_pages, True, index + 1)


def test_healthy_rows_give_the_expected_tokens() -> None:
    driver = Driver()
    tokens = [driver.prefill(0, [3, 7])]
    for index in range(49):
        grows = (9,) if index == 28 else ()
        first_new_page = 2
        row = msgspec.structs.replace(decode(0, index, tokens[-1], grows), first_new_page=first_new_page)
        output = driver.run(row)
        assert not output.errors
        tokens += output.token_ids[0]
    assert tokens == expected_tokens(PROMPT, 50, VOCAB_SIZE)


def test_the_answer_does_not_depend_on_chunks() -> None:
    driver = Driver()
    output = driver.run(PlannedRow(4, 0, PROMPT[:64], 0, [2], False, 0), admit=(4,))
    assert output.token_ids == [[]]
    output = driver.run(PlannedRow(4, 64, PROMPT[64:], 1, [1], True, 0))
    assert output.token_ids == [expected_tokens(PROMPT, 1, VOCAB_SIZE)]


def test_end_ids_never_occur() -> None:
    avoid = range(0, VOCAB_SIZE, 2)
    assert all(token % 2 for token in expected_tokens(PROMPT, 200, VOCAB_SIZE, avoid_ids=avoid))


def test_a_repeated_row_gives_the_same_token() -> None:
    driver = Driver()
    first = driver.prefill(0, [3, 7])
    once = driver.run(decode(0, 0, first))
    again = driver.run(decode(0, 0, first))
    assert once.token_ids == again.token_ids
    assert not again.errors


FAULTS: dict[str, tuple[Callable[[int], PlannedRow], str]] = {
    "a token is lost": (lambda token: decode(0, 1, token), "position 100 was due"),
    "a token is doubled": (lambda token: PlannedRow(0, 99, [5, token], 2, [], True, 1), "position 100 was due"),
    "a token is foreign": (lambda token: decode(0, 0, token ^ 1), "was sampled"),
    "an output is skipped": (lambda token: PlannedRow(0, 100, [token], 2, [], True, 2), "output 2 is asked for"),
    "the row has no page": (lambda token: PlannedRow(0, 100, [token] * 29, 2, [], True, 1), "do not hold the row"),
    "the table has a gap": (lambda token: PlannedRow(0, 100, [token], 3, [9], True, 1), "extended from 3"),
    "the sink is granted": (lambda token: decode(0, 0, token, (0,)), "is the sink"),
    "a page that does not exist": (lambda token: decode(0, 0, token, (12,)), "does not exist"),
    "a page is granted twice to one": (lambda token: decode(0, 0, token, (7,)), "granted to it twice"),
    "the table is rewritten": (lambda token: PlannedRow(0, 100, [token], 1, [9], True, 1), "is replaced by 9"),
    "a slot nobody was granted": (lambda token: decode(3, 0, token), "never granted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_row_is_named_and_touches_no_neighbour(fault: str) -> None:
    make_row, message = FAULTS[fault]
    driver = Driver()
    token, neighbour = driver.prefill(0, [3, 7]), driver.prefill(1, [4, 5])
    output = driver.run(make_row(token), decode(1, 0, neighbour))
    assert message in output.errors.pop(0)
    assert not output.errors
    assert output.token_ids == [[], expected_tokens(PROMPT, 2, VOCAB_SIZE)[1:]]


def test_a_page_given_to_two_owners_is_noticed_by_the_first() -> None:
    driver = Driver()
    first = driver.prefill(0, [3, 7])
    driver.prefill(1, [3, 8])  # page 3 is far behind the position that slot 0 goes on from
    assert "page 3 was granted to another request" in driver.run(decode(0, 0, first)).errors[0]


def test_a_page_given_away_while_a_step_is_in_flight_is_noticed() -> None:
    driver = Driver()
    first = driver.prefill(0, [3, 7])
    in_flight = driver.runner.launch(StepPlan(9, [], [decode(0, 0, first)]))
    next_step = driver.runner.launch(
        StepPlan(10, [Admission(1, SAMPLING)], [PlannedRow(1, 0, PROMPT, 0, [7, 8], True, 0)])
    )
    assert "page 7 was granted to another request" in in_flight.collect().errors[0]
    assert not next_step.collect().errors


def test_an_admission_voids_what_the_slot_held() -> None:
    driver = Driver()
    first = driver.prefill(0, [3, 7])
    output = driver.run(decode(0, 0, first), admit=(0,))
    assert "extended from 2" in output.errors[0]


def test_a_stale_page_is_no_substitute_for_a_computed_one() -> None:
    driver = Driver()
    driver.prefill(0, [3, 7])
    driver.run(PlannedRow(1, 0, PROMPT[:64], 0, [3], False, 0), admit=(1,))
    # Slot 1 skips its second page, whose place in another's table held the very same tokens.
    output = driver.run(PlannedRow(1, 100, [1], 1, [7], True, 1))
    assert "position 64 was due" in output.errors[0]
