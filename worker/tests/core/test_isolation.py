"""A request that raises inside the engine ends alone; only a runner that computes nothing at all ends the engine."""

from __future__ import annotations

import pytest
from baleen_worker.cache.pages import PagePool
from baleen_worker.engine import Engine, RunnerBrokenError
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Flush, Flushed, Submit
from baleen_worker.request import ErrorCode, FinishReason, Request
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import StepHandle, StepPlan
from engine_rig import VOCAB_SIZE, Ledger, Lines, answer_to, make_request

POISON = 77
NUM_PAGES = 64


class BreakableRunner:
    """The fake runner until it is broken; then every launch raises."""

    def __init__(self) -> None:
        self.inner = FakeRunner(NUM_PAGES, VOCAB_SIZE)
        self.broken = False

    def launch(self, plan: StepPlan) -> StepHandle:
        if self.broken:
            raise RuntimeError("the device is gone")
        return self.inner.launch(plan)


class Worker:
    """An engine in this process with a ledger on its outbox."""

    def __init__(self, runner: FakeRunner | BreakableRunner) -> None:
        self.lines = Lines()
        self.ledger = Ledger()
        self.scheduler = Scheduler(SchedulerLimits(8, 256, 100), PagePool(NUM_PAGES))
        self.engine = Engine(self.scheduler, runner, self.lines, self.lines)

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


@pytest.mark.parametrize("poison_in_collect", [False, True])
@pytest.mark.parametrize("position", [0, 70, 130])
def test_neighbours_of_a_poisoned_prompt_notice_nothing(position: int, poison_in_collect: bool) -> None:
    worker = Worker(
        FakeRunner(NUM_PAGES, VOCAB_SIZE, avoid_ids=(), poison_token_id=POISON, poison_in_collect=poison_in_collect)
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


def test_the_message_says_whose_fault_it_was_without_telling_internals() -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE, poison_token_id=POISON))
    worker.lines.commands.append(Submit([make_request(1, [POISON], 5)]))
    worker.engine.turn()
    [step] = worker.lines.steps()
    [(key, error)] = step.streams[0].errors
    assert (key, error.code) == (1, ErrorCode.INTERNAL)
    assert error.message == "the engine failed on this request (RuntimeError); its log says more"


def test_poison_alone_again_and_again_does_not_end_the_engine() -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE, poison_token_id=POISON))
    for key in range(50):
        worker.submit(make_request(key, [POISON, 1, 2], 5))
        worker.finish()
    worker.submit(make_request(99, [1, 2, 3], 5))
    worker.finish()
    assert worker.ends() == dict.fromkeys(range(50), ErrorCode.INTERNAL) | {99: FinishReason.LENGTH}


def test_a_step_that_fails_once_costs_nobody_anything() -> None:
    class Hiccup(BreakableRunner):
        def launch(self, plan: StepPlan) -> StepHandle:
            try:
                return super().launch(plan)
            finally:
                self.broken = False

    runner = Hiccup()
    worker = Worker(runner)
    worker.submit(*(make_request(key, [key + 1] * 70, 30) for key in range(5)))
    for _ in range(10):
        worker.turn()
        runner.broken = True
    worker.finish()
    assert set(worker.ends().values()) == {FinishReason.LENGTH}


def test_a_runner_that_computes_nothing_ends_the_engine() -> None:
    runner = BreakableRunner()
    worker = Worker(runner)
    worker.submit(*(make_request(key, [key + 1] * 70, 30) for key in range(3)))
    worker.turn()
    runner.broken = True
    with pytest.raises(RunnerBrokenError, match="the device is gone"):
        worker.turn()


def test_flush_is_refused_while_requests_are_live() -> None:
    worker = Worker(FakeRunner(NUM_PAGES, VOCAB_SIZE))
    worker.lines.commands += [Submit([make_request(1, [1], 2)]), Flush(5)]
    worker.engine.turn()
    assert Flushed(5, None) in worker.lines.events
    worker.engine.turn()
    worker.lines.commands.append(Flush(6))
    worker.engine.turn()
    assert Flushed(6, 0) in worker.lines.events
