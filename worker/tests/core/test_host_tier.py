"""The host tier: what is kept there, what comes back, and that what comes back is what went out.

The fake runner moves its tagged pages as plans ask, empties what was freed right after the copies out, and fails a step
for a page that is not what it should be; so equal tokens mean equal pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from baleen_worker.assignment import Assignment
from baleen_worker.cache.events import PagesRemoved, PagesStored
from baleen_worker.cache.host import HostTier, WritePolicy, page_digest, root_digest
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache, page_keys
from baleen_worker.config import HostCacheConfig, WorkerConfig
from baleen_worker.engine import Engine, RunnerBrokenError
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Submit
from baleen_worker.rank import start_engine
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import PageCopies, StepHandle, StepPlan
from engine_rig import PAGE_SIZE, VOCAB_SIZE, Lines, Rig, make_request

POLICIES = list(WritePolicy)
KEYS = [page_keys([index] * PAGE_SIZE) for index in range(9)]


def prompt(seed: int, num_pages: int) -> list[int]:
    return [(seed * 31 + index * 7) % VOCAB_SIZE for index in range(num_pages * PAGE_SIZE + 1)]


def digests_of(keys: list[bytes]) -> list[bytes]:
    digest, digests = root_digest(""), list[bytes]()
    for key in keys:
        digest = page_digest(digest, key)
        digests.append(digest)
    return digests


def fill(tier: HostTier, keys: list[bytes], first_page: int = 1) -> list[bytes]:
    digests = digests_of(keys)
    for place, (digest, key) in enumerate(zip(digests, keys, strict=True)):
        tier.put(digest, key, first_page + place, place, None)
    return digests


# --- the tier by itself -----------------------------------------------------------------------------------------------


def test_a_chain_is_found_up_to_its_first_gap() -> None:
    tier = HostTier(8, WritePolicy.WRITE_THROUGH)
    digests = fill(tier, KEYS[:5])
    assert tier.find(root_digest(""), KEYS) == digests
    assert tier.find(digests[1], KEYS[2:]) == digests[2:]
    assert tier.find(root_digest(""), KEYS[1:]) == [], "a page depends on all before it"
    assert tier.find(root_digest("other"), KEYS) == [], "tenants find nothing of each other"
    copies = tier.take()
    assert copies is not None
    assert [page for page, _ in copies.out] == [1, 2, 3, 4, 5]
    assert tier.take() is None
    tier.check()


def test_the_least_recently_used_entry_makes_room_but_not_one_on_its_way_back() -> None:
    tier = HostTier(2, WritePolicy.WRITE_THROUGH)
    first, second = (digests_of([key])[0] for key in KEYS[:2])
    tier.put(first, KEYS[0], 1, 1, None)
    tier.put(second, KEYS[1], 2, 2, None)
    tier.take()
    tier.pin([first])
    for number in range(2, 5):
        tier.put(digests_of([KEYS[number]])[0], KEYS[number], 10 + number, number, None)
        tier.check()
    assert tier.find(root_digest(""), KEYS[:1]) == [first]
    tier.fetch(first, 7)
    copies = tier.take()
    assert copies is not None
    assert [page for page, _ in copies.out] == [14], "what was overwritten before it was copied is not copied"
    assert [page for _, page in copies.back] == [7]
    assert {host for _, host in copies.out}.isdisjoint(host for host, _ in copies.back)


def test_a_chain_ends_where_a_page_has_made_way() -> None:
    tier = HostTier(3, WritePolicy.WRITE_THROUGH)
    digests = fill(tier, KEYS[:3])
    for place in (0, 2):  # used once more: the one between them is the least recently used
        tier.put(digests[place], KEYS[place], 1 + place, place, None)
    tier.put(digests_of([KEYS[5]])[0], KEYS[5], 9, 9, None)
    assert tier.find(root_digest(""), KEYS[:3]) == digests[:1]
    tier.check()


def test_events_name_the_tier() -> None:
    pages = PagePool(9)
    cache = PrefixCache(pages, host=HostTier(1, WritePolicy.WRITE_THROUGH))
    node = cache.root("")
    cache.hold(node)
    for key in KEYS[:2]:
        node = cache.extend(node, key, pages.alloc(1)[0])
    on_device, first, gone, second = cache.take_events()
    assert isinstance(on_device, PagesStored)
    assert not on_device.on_host
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert (first.on_host, second.on_host, second.parent_hash) == (True, True, first.page_hashes[0])
    assert gone == PagesRemoved(first.page_hashes, True)


# --- with the scheduler -----------------------------------------------------------------------------------------------


def rig_of(policy: WritePolicy, **options: Any) -> Rig:
    return Rig(num_pages=9, max_step_tokens=1024, num_host_pages=40, write_policy=policy, **options)


def serve(rig: Rig, key: int, token_ids: list[int]) -> int:
    """Serves one prompt and returns how many of its tokens were cached."""
    rig.submit(make_request(key, token_ids, 3))
    rig.finish()
    return rig.ledger.accounts[1, key].cached_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evicted_prompt_comes_back_from_the_host(policy: WritePolicy) -> None:
    rig = rig_of(policy)
    assert serve(rig, 1, prompt(1, 6)) == 0
    assert serve(rig, 2, prompt(2, 6)) == 0
    assert rig.cache is not None
    assert rig.cache.num_pages <= 8
    assert serve(rig, 3, prompt(1, 6)) == 6 * PAGE_SIZE, "all whole pages are found, on the device or on the host"
    load = rig.scheduler.load
    assert load.host_fetched_pages >= 4
    assert load.prompt_tokens == 2 * len(prompt(1, 6)) + 1, "what came back was not computed again"


def test_write_through_copies_once_and_write_back_only_what_is_evicted() -> None:
    stored = {}
    for policy in POLICIES:
        rig = rig_of(policy)
        for key in range(3):
            serve(rig, key, prompt(1, 6))
        stored[policy] = rig.scheduler.load.host_stored_pages
    assert stored == {WritePolicy.WRITE_THROUGH: 6, WritePolicy.WRITE_BACK: 0}


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_share_a_beginning_on_the_host_fetch_it_once(policy: WritePolicy) -> None:
    rig = rig_of(policy, max_running=2)
    serve(rig, 1, prompt(1, 3))
    serve(rig, 2, prompt(2, 7))
    before = rig.scheduler.load.host_fetched_pages
    for key in (3, 4):
        rig.submit(make_request(key, [*prompt(1, 3)[:-1], key], 3))
    rig.finish()
    assert [rig.ledger.accounts[1, key].cached_tokens for key in (3, 4)] == [3 * PAGE_SIZE] * 2
    assert rig.scheduler.load.host_fetched_pages - before <= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flush_empties_both_tiers(policy: WritePolicy) -> None:
    rig = rig_of(policy)
    for seed in (1, 2):
        serve(rig, seed, prompt(seed, 6))
    rig.scheduler.flush()
    assert rig.host is not None
    assert (len(rig.host), rig.pages.num_free) == (0, rig.pages.capacity)
    assert serve(rig, 3, prompt(1, 6)) == 0
    rig.host.check()


def test_a_copy_that_is_left_out_is_noticed() -> None:
    rig = rig_of(WritePolicy.WRITE_BACK)
    for seed in (1, 2):
        serve(rig, seed, prompt(seed, 6))
    rig.submit(make_request(3, prompt(1, 6), 3))
    plan = rig.scheduler.plan()
    assert plan is not None
    assert plan.copies is not None
    forgetful = StepPlan(plan.step, plan.admissions, plan.rows, PageCopies(plan.copies.out, ()))
    assert "but holds 0 tokens" in rig.runner.launch(forgetful).collect().errors[0]


def test_copies_that_fail_end_the_engine() -> None:
    class Torn(FakeRunner):
        def launch(self, plan: StepPlan) -> StepHandle:  # pyright: ignore[reportIncompatibleMethodOverride]
            if plan.copies is not None:
                plan = StepPlan(plan.step, plan.admissions, plan.rows, PageCopies([(8, 0)], ()))
            return super().launch(plan)

    pages = PagePool(9)
    cache = PrefixCache(pages, host=HostTier(8, WritePolicy.WRITE_THROUGH))
    lines = Lines()
    scheduler = Scheduler(SchedulerLimits(2, 1024, 9), pages, cache)
    engine = Engine(scheduler, Torn(9, VOCAB_SIZE, num_host_pages=8), lines, lines)
    lines.commands.append(Submit([make_request(1, prompt(1, 2), 5)]))
    engine.turn()
    with pytest.raises(RunnerBrokenError, match="pages could not be copied"):
        engine.turn()


def test_the_rank_builds_the_tier_that_its_configuration_describes() -> None:
    host_cache = HostCacheConfig(WritePolicy.WRITE_BACK.value, ratio=1.5)
    config = WorkerConfig(Path("unused"), runner="fake", max_total_tokens=8 * PAGE_SIZE, host_cache=host_cache)
    assignment = Assignment(config, Path("unused"), 0, VOCAB_SIZE, ())
    assert Assignment.decode(assignment.encode()) == assignment
    lines = Lines()
    engine = start_engine(assignment, lines)
    for key, seed in enumerate((1, 2, 1)):
        lines.commands.append(Submit([make_request(key, prompt(seed, 6), 3)]))
        while engine.turn():
            pass
    load = lines.steps()[-1].load
    assert (load.host_capacity_pages, load.total_pages) == (12, 8)
    assert load.host_fetched_pages > 0
    assert load.cached_tokens == 6 * PAGE_SIZE
