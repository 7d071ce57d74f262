"""What the scheduler promises, one promise a test: order, budgets, chunks, ends."""

from __future__ import annotations

import pytest
from baleen_worker.cache.pages import PagePool
from baleen_worker.request import ErrorCode, FinishReason
from baleen_worker.scheduler import SchedulerLimits
from baleen_worker.step import StepOutput, StepPlan
from engine_rig import PAGE_SIZE, Rig, make_request


def prompt(length: int) -> list[int]:
    return [index % 97 for index in range(length)]


def land_with(rig: Rig, token_ids: list[list[int]]) -> list[tuple[list[int], FinishReason | None]]:
    """Commits the oldest step with given tokens instead of the runner's."""
    plan, _ = rig.flights.popleft()
    outputs = rig.scheduler.commit(plan, StepOutput(plan.step, token_ids))
    return [(output.token_ids, output.finish_reason) for output in outputs]


def rows_of(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(start, tokens) of each row."""
    return [] if plan is None else [(row.start, len(row.token_ids)) for row in plan.rows]


def test_a_prompt_is_cut_at_page_boundaries_and_shares_steps_with_decodes() -> None:
    rig = Rig(max_step_tokens=130)
    rig.submit(make_request(1, prompt(3), 10))
    assert rows_of(rig.step()) == [(0, 3)]
    rig.submit(make_request(2, prompt(300), 10))
    assert rows_of(rig.step()) == [(3, 1), (0, 128)]
    assert rows_of(rig.step()) == [(4, 1), (128, 128)]
    assert rows_of(rig.step()) == [(5, 1), (256, 44)]
    rig.finish()


def test_several_short_prompts_share_one_step() -> None:
    rig = Rig(max_step_tokens=128, max_running=4)
    for key, length in enumerate((50, 60, 30)):
        rig.submit(make_request(key, prompt(length), 1))
    # 18 tokens are left for the third, which do not reach a page boundary, so it waits for the next step.
    assert rows_of(rig.step()) == [(0, 50), (0, 60)]
    assert rows_of(rig.step()) == [(0, 30)]


def test_a_full_house_of_decodes_leaves_a_page_for_a_prompt_and_takes_turns() -> None:
    rig = Rig(max_step_tokens=66, max_running=8, num_pages=65)
    for key in range(6):
        rig.submit(make_request(key, prompt(1), 100))
    rig.step()
    rig.submit(make_request(9, prompt(200), 1))
    advanced: set[int] = set()
    for chunk in range(3):
        plan = rig.step()
        assert plan is not None
        assert [row.start for row in plan.rows[2:]] == [chunk * PAGE_SIZE]
        assert len(plan.rows) == 3
        advanced |= {row.slot for row in plan.rows[:2]}
    assert len(advanced) == 6, "decodes that exceed the budget take turns"
    rig.finish()


def test_admission_is_first_come_first_served_within_a_priority() -> None:
    rig = Rig(max_running=1)
    for key, priority in enumerate((0, 0, 5, -3, 5)):
        rig.submit(make_request(key, prompt(4), 2, priority=priority))
    ended: list[int] = []
    while not rig.scheduler.idle:
        before = set(rig.ledger.live)
        rig.step()
        ended += [key for _, key in sorted(before - set(rig.ledger.live))]
    assert ended == [2, 4, 0, 1, 3]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    rig = Rig(num_pages=11, max_running=4, max_step_tokens=1024, conservativeness=2.0)
    rig.submit(make_request(1, prompt(64), 6 * 64))  # expected to grow to 7 of 10 pages
    rig.submit(make_request(2, prompt(64)[::-1], 4 * 64))  # to 5: does not fit beside it
    rig.submit(make_request(3, prompt(10), 10))  # would fit
    rig.step()
    assert rig.scheduler.load.running_requests == 1
    while (1, 1) in rig.ledger.live:
        rig.step()
    rig.step()
    assert rig.scheduler.load.running_requests == 2
    rig.finish()


@pytest.mark.parametrize(("conservativeness", "num_running"), [(2.0, 3), (0.5, 5), (0.0, 12)])
def test_admission_counts_what_running_requests_are_expected_to_grow_by(
    conservativeness: float, num_running: int
) -> None:
    rig = Rig(num_pages=13, max_running=16, max_step_tokens=1024, conservativeness=conservativeness)
    for key in range(16):
        rig.submit(make_request(key, [key] * 64, 3 * 64))  # one page now, three more later, of 12
    rig.step()
    assert rig.scheduler.load.running_requests == num_running
    rig.finish()


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    rig = Rig(num_pages=5)
    refusal = rig.scheduler.add(make_request(1, prompt(200), 57), 0)
    assert refusal is not None
    assert refusal.error is not None
    assert (refusal.error.code, refusal.error.field) == (ErrorCode.INVALID_ARGUMENT, "max_tokens")
    assert rig.scheduler.add(make_request(2, prompt(200), 56), 0) is None


def test_the_queue_is_bounded() -> None:
    rig = Rig(max_queued=2)
    assert rig.scheduler.add(make_request(1, prompt(1), 1), 0) is None
    assert rig.scheduler.add(make_request(2, prompt(1), 1), 0) is None
    refusal = rig.scheduler.add(make_request(3, prompt(1), 1), 0)
    assert refusal is not None
    assert refusal.error is not None
    assert refusal.error.code is ErrorCode.RESOURCE_EXHAUSTED


def test_an_id_that_is_live_cannot_be_used_again() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(5), 5))
    refusal = rig.scheduler.add(make_request(1, prompt(5), 5), 0)
    assert refusal is not None
    assert refusal.error is not None
    assert refusal.error.field == "key"
    rig.finish()


def test_scoring_samples_nothing_and_tells_every_prompt_token() -> None:
    rig = Rig(max_step_tokens=64)
    rig.submit(make_request(1, prompt(150), 0, prompt_logprobs=0))
    rig.finish()  # the ledger compares all 149 log-probabilities
    account = rig.ledger.accounts[1, 1]
    assert account.end is FinishReason.LENGTH
    assert len(account.prompt_logprobs) == 149


def test_a_stop_token_is_the_last_token() -> None:
    rig = Rig()
    free = make_request(1, prompt(5), 20)
    rig.submit(free)
    rig.finish()
    answer = rig.ledger.accounts[1, 1].token_ids
    rig.submit(make_request(2, prompt(5), 20, stop_token_ids=(answer[7],)))
    rig.finish()
    stopped = rig.ledger.accounts[1, 2]
    assert stopped.end is FinishReason.STOP
    assert stopped.token_ids == answer[: answer.index(answer[7]) + 1]


def test_a_row_may_yield_several_tokens_and_ends_at_the_first_that_ends_the_request() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(60), 10, stop_token_ids=(99,)))
    rig.submit(make_request(2, prompt(62), 4))
    rig.launch()
    assert land_with(rig, [[11, 12, 13], [21]]) == [([11, 12, 13], None), ([21], None)]
    plan = rig.launch()
    assert plan is not None
    # All but the last of the three tokens are in the pages already.
    assert [(row.start, row.token_ids, row.output_index) for row in plan.rows] == [(62, [13], 3), (62, [21], 1)]
    assert land_with(rig, [[14, 99, 15], [22, 23, 24, 25]]) == [
        ([14, 99], FinishReason.STOP),
        ([22, 23, 24], FinishReason.LENGTH),
    ]
    assert rig.scheduler.idle
    rig.scheduler.check()


def test_a_sampling_row_without_a_token_fails_its_request_alone() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(4), 10))
    rig.submit(make_request(2, prompt(4), 10))
    rig.launch()
    plan, _ = rig.flights.popleft()
    outputs = rig.scheduler.commit(plan, StepOutput(plan.step, [[], [5]]))
    assert [output.error.code if output.error else output.token_ids for output in outputs] == [ErrorCode.INTERNAL, [5]]
    assert rig.scheduler.load.running_requests == 1


def test_pages_and_slot_stay_until_the_steps_in_flight_have_landed() -> None:
    rig = Rig(num_pages=5, max_running=1, max_step_tokens=64)
    rig.submit(make_request(1, prompt(128), 10))
    rig.launch()
    rig.launch()
    rig.abort((1, 1))
    rig.submit(make_request(2, prompt(128), 10))
    assert rig.launch() is None, "the slot is granted again while a step in flight refers to it"
    assert rig.scheduler.load.used_pages == 2
    rig.land()
    assert rig.scheduler.load.used_pages == 2
    rig.land()
    assert rig.scheduler.load.used_pages == 0
    rig.finish()


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    rig = Rig(max_running=1)
    rig.submit(make_request(1, prompt(5), 1000, deadline_ms=100))
    rig.submit(make_request(2, prompt(5), 1000, deadline_ms=50))
    rig.step()
    assert rig.scheduler.expire(49.9) == []
    late = rig.scheduler.expire(50)
    assert [output.id for output in late] == [(1, 2)]
    late = rig.scheduler.expire(100)
    assert [output.id for output in late] == [(1, 1)]
    assert all(output.error and output.error.code is ErrorCode.DEADLINE_EXCEEDED for output in late)
    assert rig.scheduler.idle
    rig.scheduler.check()


def test_load_counts_what_is_there() -> None:
    rig = Rig(max_running=1, max_step_tokens=64)
    rig.submit(make_request(1, prompt(100), 3))
    rig.submit(make_request(2, prompt(7), 3))
    assert rig.scheduler.load.waiting_prompt_tokens == 107
    rig.step()
    load = rig.scheduler.load
    assert (load.running_requests, load.waiting_requests, load.used_pages) == (1, 1, 2)
    assert load.waiting_prompt_tokens == 36 + 7
    rig.finish()
    load = rig.scheduler.load
    assert (load.prompt_tokens, load.generated_tokens, load.used_pages) == (107, 6, 0)


@pytest.mark.parametrize("limits", [(0, 64, 1), (1, 63, 1), (1, 64, 0)])
def test_limits_that_serve_nothing_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be able|cannot hold"):
        SchedulerLimits(*limits)


def test_the_pool_never_grants_the_sink_and_notices_misuse() -> None:
    pool = PagePool(5)
    pages = pool.alloc(4)
    assert sorted(pages) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="asked of"):
        pool.alloc(1)
    pool.free(pages[:1])
    with pytest.raises(AssertionError, match="was not granted"):
        pool.free(pages[:1])
    with pytest.raises(AssertionError, match="granted but"):
        pool.check(pages[2:])
    pool.check(pages[1:])
    with pytest.raises(ValueError, match="cannot serve"):
        PagePool(1)
