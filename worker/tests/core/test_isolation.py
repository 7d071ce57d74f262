"""A request that raises inside the engine ends alone; only a runner that computes nothing at all ends the engine."""

from __future__ import annotations

import pytest
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.engine import Engine, RunnerBrokenError
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Flush, Flushed, Submit
from baleen_worker.request import ErrorCode, FinishReason, Request
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import DeviceLostError, StepHandle, StepOutput, StepPlan
from engine_rig import VOCAB_SIZE, Ledger, Lines, answer_to, make_request

POISON = 77
NUM_PAGES = 64


class BreakableRunner:
    """The fake runner until it is broken; then every launch raises."""

    def __init__(self) -> None:
        self.inner = FakeRunner(NUM_PAGES, VOCAB_SIZE)
        self.broken = self.lost = False

    def launch(self, plan: StepPlan) -> StepHandle:
        if self.broken:
            raise RuntimeError("the device is gone")
        return self.inner.launch(plan)


class Worker:
    """An engine in this process with a ledger on its outbox."""

    def __init__(self, runner: FakeRunner | BreakableRunner, depth: int) -> None:
        self.lines = Lines()
        self.ledger = Ledger()
        inner = runner.inner if isinstance(runner, BreakableRunner) else runner
        pages = PagePool(NUM_PAGES, on_free=inner.poison)
        self.scheduler = Scheduler(SchedulerLimits(8, 256, 100), pages, PrefixCache(pages))
        self.engine = Engine(self.scheduler, runner, self.lines, self.lines, depth=depth)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.ledger.open(request)
        self.lines.commands.append(Submit(list(requests)))

    def turn(self) -> None:
        self.engine.turn()
        for event in self.lines.steps():
            for columns in event.streams:
                self.ledger.enter_columns(columns)

    def finish(self) -> None:
        self.turn()
        while not self.scheduler.idle:
            self.turn()

    def ends(self) -> dict[int, FinishReason | ErrorCode | None]:
        return {key: account.end for (_, key), account in self.ledger.accounts.items()}


@pytest.fixture(params=[1, 2, 3])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps in flight."""
    return request.param


@pytest.mark.parametrize("poison_in_collect", [False, True])
@pytest.mark.parametrize("position", [0, 70, 130])
def test_neighbours_of_a_poisoned_prompt_notice_nothing(position: int, poison_in_collect: bool, depth: int) -> None:
    worker = Worker(
        FakeRunner(NUM_PAGES, VOCAB_SIZE, avoid_ids=(), poison_token_id=POISON, poison_in_collect=poison_in_collect),
        depth,
    )
    healthy = [make_request(key, [key + 1] * 90, 5, logprobs=1) for key in range(4)]
    assert not any(POISON in answer_to(request) for request in healthy)
    poisoned = [1] * 140
    poisoned[position] = POISON
    worker.submit(*healthy[:2])
    worker.turn()
    worker.submit(make_request(10, poisoned, 20), *healthy[2:])
    worker.finish()
    assert worker.ends() == dict.fromkeys(range(4), FinishReason.LENGTH) | {10: ErrorCode.INTERNAL}
    worker.scheduler.check()


def test_the_message_says_whose_fault_it_was_without_telling_internals(depth: int) -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE, poison_token_id=POISON), depth)
    worker.lines.commands.append(Submit([make_request(1, [POISON], 5)]))
    while not (events := [step for step in worker.lines.steps() if step.streams]):
        worker.engine.turn()
    [step] = events
    [(key, error)] = step.streams[0].errors
    assert (key, error.code) == (1, ErrorCode.INTERNAL)
    assert error.message == "the engine failed on this request (RuntimeError); its log says more"


def test_poison_alone_again_and_again_does_not_end_the_engine(depth: int) -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE, poison_token_id=POISON), depth)
    for key in range(50):
        worker.submit(make_request(key, [POISON, 1, 2], 5))
        worker.finish()
    worker.submit(make_request(99, [1, 2, 3], 5))
    worker.finish()
    assert worker.ends() == dict.fromkeys(range(50), ErrorCode.INTERNAL) | {99: FinishReason.LENGTH}


def test_a_step_that_fails_once_costs_nobody_anything(depth: int) -> None:
    class Hiccup(BreakableRunner):
        def launch(self, plan: StepPlan) -> StepHandle:
            try:
                return super().launch(plan)
            finally:
                self.broken = False

    runner = Hiccup()
    worker = Worker(runner, depth)
    worker.submit(*(make_request(key, [key + 1] * 70, 30) for key in range(5)))
    for _ in range(10):
        worker.turn()
        runner.broken = True
    worker.finish()
    assert set(worker.ends().values()) == {FinishReason.LENGTH}


def test_a_runner_that_computes_nothing_ends_the_engine(depth: int) -> None:
    runner = BreakableRunner()
    worker = Worker(runner, depth)
    worker.submit(*(make_request(key, [key + 1] * 70, 30) for key in range(3)))
    worker.turn()
    runner.broken = True
    with pytest.raises(RunnerBrokenError, match="the device is gone"):  # noqa: PT012 - at the latest at that turn
        for _ in range(depth + 1):
            worker.turn()


def test_nothing_is_computed_again_on_a_device_that_is_lost(depth: int) -> None:
    class Losable(BreakableRunner):
        def launch(self, plan: StepPlan) -> StepHandle:
            step = super().launch(plan)
            return LostStep() if self.lost else step

    class LostStep:
        num_collected = 0

        def collect(self) -> StepOutput:
            LostStep.num_collected += 1
            raise DeviceLostError("an illegal memory access was encountered")

    runner = Losable()
    worker = Worker(runner, depth)
    worker.submit(*(make_request(key, [key + 1] * 70, 30) for key in range(3)))
    worker.turn()
    runner.lost = True
    with pytest.raises(RunnerBrokenError, match="the device is lost: an illegal memory access"):  # noqa: PT012
        for _ in range(depth + 1):
            worker.turn()
    assert LostStep.num_collected == 1


def test_flush_is_refused_while_requests_are_live_and_drops_the_cache_afterwards() -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE), 2)
    worker.lines.commands += [Submit([make_request(1, [1] * 150, 2)]), Flush(5)]
    worker.engine.turn()
    assert Flushed(5, None) in worker.lines.events
    while not worker.scheduler.idle:
        worker.engine.turn()
    worker.lines.commands += [Flush(6), Flush(7)]
    worker.engine.turn()
    assert Flushed(6, 2) in worker.lines.events
    assert Flushed(7, 0) in worker.lines.events
