"""What is found, who makes way, who is next: the prefix cache and the queue as the scheduler uses them."""

from __future__ import annotations

import pytest
from baleen_worker.request import FinishReason
from baleen_worker.step import StepPlan
from baleen_worker.waiting import MAX_OVERTAKEN, Policy
from engine_rig import PAGE_SIZE, Rig, make_request


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + index) % 97 for index in range(length)]


def starts_of(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [row.start for row in plan.rows]


def cached_of(rig: Rig, key: int) -> int:
    return rig.ledger.accounts[1, key].cached_tokens


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "found"), [(63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (200, 192)]
)
def test_a_prompt_is_found_by_whole_pages_and_its_last_token_is_always_computed(length: int, found: int) -> None:
    rig = Rig(max_step_tokens=256)
    rig.submit(make_request(1, prompt(length), 3))
    rig.finish()
    rig.submit(make_request(2, prompt(length), 3))
    assert starts_of(rig.launch()) == [found]
    rig.finish()
    assert (cached_of(rig, 1), cached_of(rig, 2)) == (0, found)
    assert rig.scheduler.load.cached_tokens == found


def test_output_is_found_too_as_the_next_turn_of_a_conversation_does() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(60), 70))
    rig.finish()
    said = rig.ledger.accounts[1, 1].token_ids
    rig.submit(make_request(2, [*prompt(60), *said, 5, 6, 7], 3))
    rig.finish()
    assert cached_of(rig, 2) == 128


def test_other_tenants_and_prompt_scores_find_nothing() -> None:
    rig = Rig()
    for key, (salt, prompt_logprobs) in enumerate((("", None), ("x", None), ("", 1), ("", None))):
        rig.submit(make_request(key, prompt(150), 3, cache_salt=salt, prompt_logprobs=prompt_logprobs))
        rig.finish()
    assert [cached_of(rig, key) for key in range(4)] == [0, 0, 0, 128]


def test_without_a_cache_nothing_is_found() -> None:
    rig = Rig(with_cache=False)
    for key in range(2):
        rig.submit(make_request(key, prompt(150), 3))
        rig.finish()
    assert cached_of(rig, 1) == 0
    assert rig.pages.num_free == rig.pages.capacity
    assert rig.scheduler.flush() == 0


def test_samples_of_one_prompt_wait_for_the_first_and_share_its_pages() -> None:
    rig = Rig(num_pages=65, max_running=8, max_step_tokens=2048)
    for key in range(8):
        rig.submit(make_request(key, prompt(300), 5, group_id=b"g"))
    plan = rig.step()
    assert starts_of(plan) == [0]
    assert rig.scheduler.load.waiting_requests == 7
    plan = rig.step()
    assert starts_of(plan) == [300, *[256] * 7]
    assert rig.scheduler.load.used_pages == 4 + 8
    rig.finish()


def test_the_next_sample_leads_when_the_first_is_aborted() -> None:
    rig = Rig(num_pages=65, max_step_tokens=64)
    for key in range(4):
        rig.submit(make_request(key, prompt(300), 5, group_id=b"g"))
    rig.step()
    rig.abort((1, 2))
    rig.abort((1, 0))
    rig.finish()
    assert [rig.ledger.accounts[1, key].end for key in range(4)] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    assert cached_of(rig, 3) == 256


# --- preemption -------------------------------------------------------------------------------------------------------


def test_the_shortest_output_makes_way_and_nobody_loses_a_token() -> None:
    rig = Rig(num_pages=8, max_running=3, max_step_tokens=256, conservativeness=0.0)
    for key in range(3):
        rig.submit(make_request(key, prompt(60, key), 200, logprobs=1))
        rig.step()  # so that their outputs differ in length
    rig.finish()  # the ledger compares every token
    assert rig.scheduler.load.preemptions > 0


def test_prompt_scores_are_told_once_however_often_a_request_makes_way() -> None:
    rig = Rig(num_pages=8, max_running=2, max_step_tokens=64, conservativeness=0.0)
    rig.submit(make_request(1, prompt(100), 300))
    for _ in range(28):
        rig.step()
    rig.submit(make_request(2, prompt(300, 7), 20, prompt_logprobs=2))
    rig.finish()  # the ledger compares every log-probability
    assert rig.scheduler.load.preemptions > 0


def test_a_higher_priority_takes_a_running_ones_place_only_above_the_threshold() -> None:
    rig = Rig(max_running=1, preemption_threshold=3)
    rig.submit(make_request(1, prompt(70), 50))
    rig.step()
    rig.submit(make_request(2, prompt(70, 5), 5, priority=3))
    rig.step()
    assert rig.scheduler.load.preemptions == 0
    rig.submit(make_request(3, prompt(70, 9), 5, priority=4))
    while (1, 3) in rig.ledger.live:
        rig.step()
    assert rig.scheduler.load.preemptions == 1
    assert (1, 1) in rig.ledger.live
    rig.finish()


def test_one_request_that_grows_to_the_whole_pool_ends_among_many() -> None:
    rig = Rig(num_pages=11, max_running=8, max_step_tokens=128, conservativeness=0.0)
    rig.submit(make_request(0, prompt(64), 9 * 64))
    for key in range(1, 30):
        rig.submit(make_request(key, prompt(100, key), 150))
    for _ in range(20_000):
        if rig.scheduler.idle:
            break
        rig.step()
    assert rig.scheduler.idle, "requests displace each other for ever"
    rig.finish()


# --- order ------------------------------------------------------------------------------------------------------------


def served(rig: Rig) -> list[int]:
    """Keys in the order in which requests ended, one at a time."""
    order: list[int] = []
    while not rig.scheduler.idle:
        before = set(rig.ledger.live)
        rig.step()
        order += [key for _, key in sorted(before - set(rig.ledger.live))]
    return order


@pytest.mark.parametrize(
    ("policy", "order"),
    [(Policy.FCFS, [1, 2, 3, 4]), (Policy.LONGEST_PREFIX, [3, 2, 1, 4]), (Policy.SHORTEST_PREFILL, [4, 2, 3, 1])],
)
def test_policies_order_what_waits(policy: Policy, order: list[int]) -> None:
    rig = Rig(max_running=1, num_pages=65, policy=policy)
    rig.submit(make_request(0, prompt(300), 1))
    rig.finish()
    for key, request in enumerate((prompt(250, 50), prompt(80), prompt(250), prompt(10, 50)), 1):
        rig.submit(make_request(key, request, 1))
    assert served(rig) == order


def test_nobody_is_overtaken_for_ever() -> None:
    rig = Rig(max_running=1, num_pages=129, policy=Policy.SHORTEST_PREFILL)
    rig.submit(make_request(0, prompt(300), 1))
    for key in range(1, 2 * MAX_OVERTAKEN):
        rig.submit(make_request(key, prompt(3, key), 1))
    assert served(rig).index(0) == MAX_OVERTAKEN


def test_tenants_get_equal_shares_of_what_is_computed() -> None:
    rig = Rig(max_running=1, num_pages=129)
    for key in range(30):
        rig.submit(make_request(key, prompt(4 * PAGE_SIZE, key), 1, cache_salt="greedy"))
    for key in range(100, 104):
        rig.submit(make_request(key, prompt(PAGE_SIZE, key), 1, cache_salt="modest"))
    order = served(rig)
    assert max(order.index(key) for key in range(100, 104)) < 7


def test_who_made_way_for_is_planned_in_the_same_plan() -> None:
    rig = Rig(num_pages=9, max_step_tokens=1024, preemption_threshold=0)
    rig.submit(make_request(1, prompt(6 * PAGE_SIZE), 50))
    rig.step()
    rig.submit(make_request(2, prompt(6 * PAGE_SIZE, 50), 50, priority=1))
    plan = rig.launch()
    assert plan is not None, "the only one that ran makes way, and nobody runs"
    assert [admission.sampling.max_tokens for admission in plan.admissions] == [50]
    rig.land()
    rig.finish()


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_the_next_token_is_planned_before_the_last_one_is_known() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(63), 4))
    plans = [rig.launch() for _ in range(3)]
    rows = [plan.rows[0] for plan in plans if plan is not None]
    assert [(row.start, row.num_tokens, row.from_device, row.output_index) for row in rows] == [
        (0, 63, False, 0),
        (63, 1, True, 1),
        (64, 1, True, 2),
    ]
    assert [len(row.new_pages) for row in rows] == [1, 0, 1]
    rig.finish()


def test_the_last_token_is_not_planned_past_and_a_stop_costs_one_wasted_token() -> None:
    rig = Rig()
    rig.submit(make_request(1, prompt(5), 2))
    assert [starts_of(rig.launch()) for _ in range(3)] == [[0], [5], []]
    rig.finish()
    answer = rig.ledger.accounts[1, 1].token_ids
    rig.submit(make_request(2, prompt(5), 50, stop_token_ids=(answer[1],)))
    for _ in range(3):
        rig.launch()
    for _ in range(3):
        rig.land()
    assert rig.ledger.accounts[1, 2].end is FinishReason.STOP
    assert rig.scheduler.load.generated_tokens == 4, "a token past the end is nobody's"
    rig.finish()
