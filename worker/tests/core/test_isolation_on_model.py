"""The engine takes a step of the real model apart when a row raises: neighbours' tokens stay the same, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from baleen_worker.cache.pages import PagePool
from baleen_worker.config import WorkerConfig
from baleen_worker.engine import Engine
from baleen_worker.messages import Submit
from baleen_worker.request import ErrorCode, Request, SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import BuiltRunner, Runner, StepHandle, StepOutput, StepPlan
from engine_rig import Lines

MODEL = Path(__file__).resolve().parents[3] / "models" / "micro"
POISON = 1999
MAX_TOKENS = 6


class Poisonable:
    """Passes plans on to a runner, and raises where a prompt holds the poison: before or after the work is done."""

    def __init__(self, inner: Runner, *, after: bool) -> None:
        self._inner = inner
        self._after = after
        self.num_raised = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        """Raises at once, or returns a step that raises when it is collected."""
        poisoned = any(POISON in row.token_ids for row in plan.rows if row.output_index == 0)
        self.num_raised += poisoned
        if poisoned and not self._after:
            raise RuntimeError("poisoned before the work")
        handle = self._inner.launch(plan)
        return Spoilt(handle) if poisoned else handle


class Spoilt:
    """A step whose work is done and whose results are lost."""

    def __init__(self, inner: StepHandle) -> None:
        self._inner = inner

    def collect(self) -> StepOutput:
        """Raises after the work."""
        self._inner.collect()
        raise RuntimeError("poisoned after the work")


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    return build_runner(WorkerConfig(model_dir=MODEL, device="cpu", max_total_tokens=4096, max_running_requests=8))


def serve(built: BuiltRunner, runner: Runner, *, poisoned: bool) -> tuple[dict[int, list[int]], dict[int, ErrorCode]]:
    """Four requests of different kinds, the poisoned one arriving while two decode; tokens and errors by key."""
    lines = Lines()
    scheduler = Scheduler(SchedulerLimits(8, 128, 100), PagePool(built.num_pages))
    engine = Engine(scheduler, runner, lines, lines)

    def request(key: int, prompt: list[int], temperature: float) -> Request:
        return Request((1, key), prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=key, temperature=temperature))

    first = [request(1, [5, 6, 7] * 20, 0.0), request(2, [9, 8] * 45, 1.0)]
    second = [request(3, list(range(10, 150)), 1.0), request(4, [11] * 3, 0.0)]
    if poisoned:
        second.insert(0, request(5, [3, 4, POISON], 0.0))
    lines.commands.append(Submit(first))
    engine.turn()
    engine.turn()
    lines.commands.append(Submit(second))
    tokens: dict[int, list[int]] = {}
    errors: dict[int, ErrorCode] = {}
    while engine.turn() or not scheduler.idle:
        pass
    for event in lines.steps():
        for columns in event.streams:
            start = 0
            for key, count in zip(columns.keys, columns.token_counts, strict=True):
                tokens.setdefault(key, []).extend(columns.token_ids[start : start + count])
                start += count
            errors |= {key: error.code for key, error in columns.errors}
    scheduler.check()
    return tokens, errors


@pytest.mark.parametrize("after", [False, True])
def test_neighbours_of_a_poisoned_request_get_the_same_tokens(built: BuiltRunner, after: bool) -> None:
    undisturbed, errors = serve(built, built.runner, poisoned=False)
    assert not errors
    assert all(len(tokens) == MAX_TOKENS for tokens in undisturbed.values())
    runner = Poisonable(built.runner, after=after)
    tokens, errors = serve(built, runner, poisoned=True)
    assert errors == {5: ErrorCode.INTERNAL}
    assert tokens == undisturbed
    assert runner.num_raised == 2, "once in the step, once alone"
