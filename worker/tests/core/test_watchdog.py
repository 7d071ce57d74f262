"""A runner that hangs or breaks: the rank says what it was doing and ends, and nobody waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import grpc
import pytest
from baleen_worker.step import PlannedRow, StepOutput, StepPlan
from baleen_worker.watchdog import WatchedRunner
from harness.struck import FAULT_TOKEN, struck
from worker_process import Client, WorkerProcess, answer_to, copy_model


class Slow:
    """A runner whose launch, or whose collect, waits for a word."""

    def __init__(self, waits_in: str) -> None:
        self.go_on = threading.Event()
        self._waits_in = waits_in

    def launch(self, plan: StepPlan) -> Slow:
        """See `Runner`."""
        if self._waits_in == "launch":
            self.go_on.wait()
        return self

    def collect(self) -> StepOutput:
        """See `StepHandle`."""
        if self._waits_in == "collect":
            self.go_on.wait()
        return StepOutput(7, [[3]])


def plan(step: int = 7) -> StepPlan:
    rows = [PlannedRow(2, 0, [4, 5, 6], 0, [9], True, 0), PlannedRow(5, 70, (), 2, (), True, 8, from_device=True)]
    return StepPlan(step, [], rows)


def watched(inner: Any, on_stall: Callable[[str], None], limit_s: float = 0.2) -> WatchedRunner:
    return WatchedRunner(inner, limit_s=limit_s, features=("kernel:a=b",), on_stall=on_stall)


@pytest.mark.parametrize("half", ["launch", "collect"])
def test_a_call_that_does_not_come_back_is_told_once(half: str) -> None:
    told: list[str] = []
    has_told = threading.Event()

    def on_stall(sentence: str) -> None:
        told.append(sentence)
        has_told.set()

    runner = watched(Slow(half), on_stall)
    caller = threading.Thread(target=lambda: runner.launch(plan()).collect(), daemon=True)
    caller.start()
    assert has_told.wait(60)
    assert f"the {half} of step 7 did not end within 0.2 s (--watchdog-timeout)" in told[0]
    record = "\n".join(runner.record())
    assert "computed with kernel:a=b" in record
    assert f"the {half} of step 7 has taken" in record
    assert "slot 2: 3 tokens at 0 to 2, samples output 0, 1 new pages" in record
    assert "slot 5: the token sampled last at 70 to 70, samples output 8, 0 new pages" in record
    assert len(told) == 1


def test_who_made_the_call_says_nothing_any_more() -> None:
    """The process is ending: the engine must not publish what it computed meanwhile."""
    inner, has_told = Slow("collect"), threading.Event()
    runner = watched(inner, lambda _: has_told.set())
    came_back = threading.Event()

    def call() -> None:
        runner.launch(plan()).collect()
        came_back.set()

    threading.Thread(target=call, daemon=True).start()
    assert has_told.wait(60)
    inner.go_on.set()
    assert not came_back.wait(0.5)


def test_time_between_calls_does_not_count() -> None:
    told: list[str] = []
    runner = watched(Slow("never"), told.append, limit_s=0.1)
    for step in range(3):
        handle = runner.launch(plan(step))
        time.sleep(0.3)
        assert handle.collect().token_ids == [[3]]
    assert told == []
    assert len([line for line in runner.record() if line.startswith("before that")]) == 3


def test_what_raised_is_on_record() -> None:
    class Raises(Slow):
        def launch(self, plan: StepPlan) -> Slow:
            raise RuntimeError("an illegal memory access")

    runner = watched(Raises("never"), lambda _: None)
    with pytest.raises(RuntimeError, match="illegal"):
        runner.launch(plan())
    record = "\n".join(runner.record())
    assert "raised RuntimeError: an illegal memory access" in record
    assert "in flight" not in record


@contextlib.contextmanager
def struck_worker(tmp_path: Path, fault: str) -> Generator[tuple[WorkerProcess, Client]]:
    """A worker under a watchdog of a second, that a request with `FAULT_TOKEN` strikes."""
    environment = struck(fault, tmp_path / "mark")
    flags = ("--watchdog-timeout", "1", "--fake-step-ms", "20")
    with (
        WorkerProcess(copy_model(tmp_path), *flags, environment=environment) as worker,
        Client(worker.address) as client,
    ):
        yield worker, client


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("hang", "the collect of step"),
        ("raise", "the model runner fails on any input: RuntimeError: the device is lost"),
    ],
)
def test_a_worker_that_is_struck_ends_with_its_record(tmp_path: Path, fault: str, sentence: str) -> None:
    with struck_worker(tmp_path, fault) as (worker, client):
        stream = client.connect()
        stream.submit(1, [5, 6, 7], 4)
        stream.read_until(lambda: 1 in stream.ends)
        assert stream.tokens[1] == answer_to(client.info(), [5, 6, 7], 4)
        stream.submit(2, [9, 9], 400)
        stream.read_until(lambda: 2 in stream.tokens)
        stream.submit(3, [FAULT_TOKEN, 7], 4)
        assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE
        assert sentence in stream.call.details()
        assert worker.wait() == 1
        said = "".join(worker.errors)
        assert sentence in worker.error_lines()[0]
    assert "computed with no kernels of its own" in said
    assert "before that, step" in said
    assert ("is in flight" in said) == (fault == "hang")
    assert ("2 tokens at 0 to 1, samples output 0" in said) == (fault == "hang")
    assert ("raised RuntimeError: the device is lost" in said) == (fault == "raise")
    assert ('File "' in said and "in collect" in said) == (fault == "hang")


@pytest.mark.parametrize(
    ("fault", "sentence", "in_log"),
    [
        ("crash", "the rank process died of signal 11 (SIGSEGV)", "Fatal Python error: Segmentation fault"),
        ("exit", "a library has ended the process that computes", "is in flight"),
        ("stuck", "the rank process died with exit status 1", "Timeout (0:00:02"),
    ],
)
def test_a_rank_that_a_library_ends_says_where(tmp_path: Path, fault: str, sentence: str, in_log: str) -> None:
    """Python is not asked in any of these."""
    with struck_worker(tmp_path, fault) as (worker, client):
        stream = client.connect()
        stream.submit(1, [FAULT_TOKEN, 7], 4)
        assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE
        assert sentence in stream.call.details()
        assert worker.wait() == 1
        said = "".join(worker.errors)
    assert in_log in said
    assert ("in _strike" in said) == (fault != "exit")
