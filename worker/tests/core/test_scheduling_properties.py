"""Properties of scheduler, pages and fake runner under any order of events, at any depth of steps in flight.

Every token is checked against what the prompt must be answered with, every page by the fake runner's tags, and after
each event all pages and slots are counted. The tests count the engine steps they generated and require enough of them.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from baleen_worker.cache.host import WritePolicy
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.engine import Engine
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Abort, AbortStream, Submit
from baleen_worker.request import ErrorCode
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.waiting import Policy
from engine_rig import PAGE_SIZE, VOCAB_SIZE, Lines, Rig, answer_to, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

MIN_STEPS_ENGINE = 20_000
# Of the state machine: engine steps, and the examples that are run at a time until there were so many.
MIN_STEPS_MACHINE = [pytest.param(100_000, id="100k"), pytest.param(1_000_000, id="1M", marks=pytest.mark.slow)]
EXAMPLES_AT_A_TIME = 25
STEPS_A_PREEMPTION = 500
STEPS_A_CACHED_TOKEN = 50
STEPS_A_FETCHED_PAGE = 2000

PROMPT_LENS = st.one_of(st.integers(1, 300), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 192, 256]))
MAX_TOKENS = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 2, 64, 65, 130]))
OPTIONAL_TOPS = (None, None, None, 0, 2)
POLICIES = list(Policy)


def make_prompt(family: int, length: int, num_own: int, key: int) -> list[int]:
    """Prompts of one family begin alike and end with `num_own` tokens of their own."""
    shared, own = random.Random(family), random.Random(key)
    num_shared = max(length - num_own, 0)
    return [shared.randrange(VOCAB_SIZE) for _ in range(num_shared)] + [
        own.randrange(VOCAB_SIZE) for _ in range(length - num_shared)
    ]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, expire and are aborted while up to three steps are in flight.

    There are fewer pages than the requests grow to, so that they are preempted all the time; prompts share prefixes,
    within and across tenants, and the cache is flushed and bounded. Somebody outside the engine takes free pages and
    puts them in quarantine, as a transfer that was cut short does, until that is proven over. Freed pages are poisoned.
    """

    num_steps = 0
    num_preemptions = 0
    num_cached_tokens = 0
    num_fetched_pages = 0

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.next_key = 0
        self.quarantined: list[int] = []

    @initialize(
        num_pages=st.integers(8, 16),
        with_cache=st.sampled_from([True, True, True, False]),
        max_idle_pages=st.sampled_from([None, None, 0, 5]),
        policy=st.sampled_from(POLICIES),
        conservativeness=st.sampled_from([0.0, 0.0, 0.5]),
        preemption_threshold=st.integers(0, 1),
        num_host_pages=st.sampled_from([0, 3, 12, 60]),
        write_policy=st.sampled_from(list(WritePolicy)),
    )
    def build(self, **options: Any) -> None:
        self.rig = Rig(max_running=6, max_step_tokens=128, max_queued=24, **options)

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 8), prompt_lens=PROMPT_LENS, max_tokens=MAX_TOKENS)
    def submit(self, seed: int, count: int, prompt_lens: int, max_tokens: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            self.next_key += 1
            group = draw.choice([0, 0, 1, 2])
            request = make_request(
                self.next_key,
                make_prompt(draw.randrange(2), prompt_lens, draw.choice([0, 1, 5, 70, 500]), self.next_key),
                draw.choice([max_tokens, draw.randrange(300)]),
                stream=draw.randint(1, 3),
                stop_token_ids=tuple(draw.sample(range(VOCAB_SIZE), draw.choice([0, 0, 10]))),
                logprobs=draw.choice(OPTIONAL_TOPS),
                prompt_logprobs=draw.choice(OPTIONAL_TOPS),
                priority=draw.randint(-1, 1),
                deadline_ms=draw.choice([None, None, draw.randint(1, 500)]),
                cache_salt=draw.choice(["", "", "a"]),
                group_id=bytes([group]) if group else b"",
            )
            self.rig.submit(request)

    @precondition(lambda self: self.rig.ledger.accounts)
    @rule(data=st.data())
    def abort_any(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.ledger.accounts))))

    @rule(stream=st.integers(1, 3))
    def abort_stream(self, stream: int) -> None:
        for request_id in self.rig.ledger.live:
            if request_id[0] == stream:
                self.rig.ledger.interrupt(request_id)
        self.rig.ledger.enter(self.rig.scheduler.abort_stream(stream))
        assert not [request_id for request_id in self.rig.ledger.live if request_id[0] == stream]

    @rule(elapsed_ms=st.integers(0, 300))
    def time_passes(self, elapsed_ms: int) -> None:
        rig = self.rig
        rig.now_ms += elapsed_ms
        outputs = rig.scheduler.expire(rig.now_ms)
        assert all(output.error and output.error.code is ErrorCode.DEADLINE_EXCEEDED for output in outputs)
        rig.ledger.enter(outputs)

    @precondition(lambda self: len(self.rig.flights) < 3)
    @rule()
    def launch(self) -> None:
        self.rig.launch()

    @precondition(lambda self: self.rig.flights)
    @rule()
    def land(self) -> None:
        self.rig.land()

    @rule()
    def flush(self) -> None:
        idle = self.rig.scheduler.idle
        num_cached = self.rig.scheduler.load.cached_pages
        assert self.rig.scheduler.flush() == (num_cached if idle else None)
        assert not idle or self.rig.pages.num_free == self.rig.pages.capacity - len(self.quarantined)

    @rule(count=st.integers(1, 4))
    def quarantine(self, count: int) -> None:
        pages = self.rig.pages.alloc(min(count, self.rig.pages.num_free))
        self.rig.pages.quarantine(pages)
        self.quarantined += pages

    @rule()
    def discharge(self) -> None:
        self.rig.pages.discharge(self.quarantined)
        self.quarantined = []

    @rule(count=st.integers(1, 600))
    def steps(self, count: int) -> None:
        for number in range(count):
            if self.rig.launch() is None and not self.rig.flights:
                return
            while self.rig.flights:
                self.rig.land()
            if number % 32 == 0:
                self.everything_is_accounted_for()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        rig = self.rig
        rig.scheduler.check(self.quarantined)
        load, pages = rig.scheduler.load, rig.pages
        assert pages.num_quarantined == len(self.quarantined)
        assert pages.num_free + load.used_pages + load.cached_pages == load.total_pages
        assert pages.num_free + pages.num_used + pages.num_quarantined == load.total_pages
        assert load.host_pages <= load.host_capacity_pages

    def teardown(self) -> None:
        self.discharge()
        self.rig.finish()
        load = self.rig.scheduler.load
        SchedulerMachine.num_steps += self.rig.num_steps
        SchedulerMachine.num_preemptions += load.preemptions
        SchedulerMachine.num_cached_tokens += load.cached_tokens
        SchedulerMachine.num_fetched_pages += load.host_fetched_pages


@pytest.mark.parametrize("min_steps", MIN_STEPS_MACHINE)
@pytest.mark.timeout(7200)
def test_any_order_of_events_at_any_depth(min_steps: int) -> None:
    """What hypothesis draws depends on constants anywhere in the product, so steps are counted, not examples."""
    SchedulerMachine.num_steps = SchedulerMachine.num_preemptions = SchedulerMachine.num_cached_tokens = 0
    SchedulerMachine.num_fetched_pages = 0
    for batch in itertools.count():
        run_state_machine_as_test(
            seeded(batch)(SchedulerMachine),
            settings=settings(
                max_examples=EXAMPLES_AT_A_TIME,
                stateful_step_count=60,
                suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType] - the stub's own metaclass
                deadline=None,
            ),
        )
        if SchedulerMachine.num_steps >= min_steps:
            break
    assert SchedulerMachine.num_preemptions >= min_steps / STEPS_A_PREEMPTION
    assert SchedulerMachine.num_cached_tokens >= min_steps / STEPS_A_CACHED_TOKEN
    assert SchedulerMachine.num_fetched_pages >= min_steps / STEPS_A_FETCHED_PAGE


def test_engine_answers_everybody_whatever_the_load() -> None:
    num_steps = 0

    @settings(max_examples=15, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        max_running=st.integers(1, 12),
        num_step_pages=st.integers(1, 6),
        num_pages=st.integers(8, 40),
        abort_share=st.sampled_from([0.0, 0.02, 0.2]),
        depth=st.sampled_from([1, 2, 2]),
    )
    def serve(seed: int, max_running: int, num_step_pages: int, num_pages: int, abort_share: float, depth: int) -> None:
        nonlocal num_steps
        num_steps += _serve_load(seed, max_running, num_step_pages * PAGE_SIZE, num_pages, abort_share, depth)

    serve()
    assert num_steps >= MIN_STEPS_ENGINE


def _serve_load(
    seed: int, max_running: int, max_step_tokens: int, num_pages: int, abort_share: float, depth: int
) -> int:
    """Drives a real Engine with arrivals at random moments; returns the steps it took."""
    draw = random.Random(seed)
    rig = Rig(num_pages=num_pages)  # for its ledger
    runner = FakeRunner(num_pages, VOCAB_SIZE)
    pages = PagePool(num_pages, on_free=runner.poison)
    scheduler = Scheduler(SchedulerLimits(max_running, max_step_tokens, 1000), pages, PrefixCache(pages))
    lines = Lines()
    engine = Engine(scheduler, runner, lines, lines, depth=depth, clock_ms=lambda: 0.0)
    longest = (num_pages - 1) * PAGE_SIZE
    arrivals: list[int] = sorted(draw.randrange(1500) for _ in range(60))
    steps = turn = 0
    while arrivals or not scheduler.idle:
        while arrivals and arrivals[0] <= turn:
            key = len(rig.ledger.accounts)
            prompt_len = draw.randrange(1, min(longest, 500))
            max_tokens = draw.randrange(0, min(longest - prompt_len, 400) + 1)
            prompt = make_prompt(draw.randrange(3), prompt_len, draw.choice([1, 40, 500]), key)
            request = make_request(key, prompt, max_tokens, stream=draw.randrange(3), priority=draw.randrange(2))
            rig.ledger.open(request)
            lines.commands.append(Submit([request]))
            arrivals.pop(0)
        if rig.ledger.live and draw.random() < abort_share:
            chosen = draw.choice(rig.ledger.live)
            rig.ledger.interrupt(chosen)
            lines.commands.append(Abort([chosen]))
        steps += engine.turn()
        turn += 1
        for event in lines.steps():
            assert event.load.used_pages <= event.load.total_pages == num_pages - 1
            for columns in event.streams:
                assert not columns.errors
                rig.ledger.enter_columns(columns)
    assert not rig.ledger.live
    assert scheduler.load.used_pages == 0
    return steps


def test_a_gone_stream_takes_its_requests_along_within_one_turn() -> None:
    rig = Rig()
    scheduler = Scheduler(SchedulerLimits(4, 128, 100), PagePool(64))
    lines = Lines()
    engine = Engine(scheduler, FakeRunner(64, VOCAB_SIZE), lines, lines)
    requests = [make_request(key, [key + 1] * 100, 50, stream=1 + key % 2) for key in range(8)]
    for request in requests:
        rig.ledger.open(request)
    lines.commands.append(Submit(requests))
    for _ in range(5):
        engine.turn()
    for event in lines.steps():
        for columns in event.streams:
            rig.ledger.enter_columns(columns)
    lines.commands.append(AbortStream(1))
    engine.turn()
    assert all(columns.stream == 2 for event in lines.steps() for columns in event.streams)
    while not scheduler.idle:
        engine.turn()
        for event in lines.steps():
            assert [columns.stream for columns in event.streams] in ([], [2])
    assert scheduler.load.used_pages == 0
    assert all(answer_to(request) for request in requests)
