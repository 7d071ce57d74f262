"""The limits of a trial: processor time, not time, and memory. A real server, and a compiler that uses up either."""

from __future__ import annotations

import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import stubborn_compiler
from baleen_worker.grammar import trial
from baleen_worker.grammar.room import RefusedError, TriedCompiler
from baleen_worker.request import Constraint

LIMIT_S = 0.75
TRIAL_S = 0.3  # as much again is for the repetition, and something for the way there and back
# A timer of processor time goes off at a tick of the kernel, and ends what has just begun to be written down.
SLACK_S = 0.1


@pytest.fixture(autouse=True)
def stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiler here is one of `stubborn_compiler`."""
    monkeypatch.setattr(trial, "_PROGRAM", (stubborn_compiler.__file__,))
    monkeypatch.setitem(sys.modules, "baleen_worker.grammar.backend", stubborn_compiler)


@pytest.fixture
def compiler() -> Iterator[TriedCompiler]:
    compiler = TriedCompiler(Path("unused"), 8, limit_s=LIMIT_S, num_threads=1)
    yield compiler
    compiler.close()


def source(text: str) -> Constraint:
    return Constraint("regex", text)


def test_less_than_half_of_the_processor_time_is_for_the_trial(compiler: TriedCompiler, tmp_path: Path) -> None:
    spent = tmp_path / "spent"
    with pytest.raises(RefusedError, match=r"too large to compile within 0\.75 s"):
        compiler.compile(source(f"spin {spent}"))
    [seconds] = stubborn_compiler.SECONDS.unpack(spent.read_bytes())
    assert TRIAL_S - SLACK_S < seconds < TRIAL_S + SLACK_S


def test_time_in_which_nothing_is_computed_does_not_count(compiler: TriedCompiler) -> None:
    assert compiler.compile(source(f"sleep {3 * LIMIT_S}"))


def test_memory_beyond_the_limit_is_refused_and_within_it_is_not(compiler: TriedCompiler) -> None:
    with pytest.raises(RefusedError, match="too large"):
        compiler.compile(source(f"take {2 << 30}"))
    assert compiler.compile(source(f"take {1 << 20}"))
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "this process has no limit"


def test_a_compiler_that_crashes_takes_nothing_along(compiler: TriedCompiler) -> None:
    with pytest.raises(RefusedError, match="too large"):
        compiler.compile(source("crash"))
    with pytest.raises(RefusedError, match="it is refused"):
        compiler.compile(source("refuse"))
    assert compiler.compile(source("sleep 0"))


def test_a_server_that_is_killed_is_replaced_and_what_it_had_is_lost_not_refused(compiler: TriedCompiler) -> None:
    assert compiler.compile(source("sleep 0"))
    server = compiler._server
    process = server._process
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.judge, source("sleep 60"), TRIAL_S)
        child = wait_for_child(psutil.Process(process.pid))
        process.send_signal(signal.SIGSTOP)  # it takes no further trial
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(trial.TrialLostError):
            compiler.compile(source("sleep 0"))
        # Not only when the trial that runs has ended.
        assert child.status() != psutil.STATUS_ZOMBIE
        child.kill()
        with pytest.raises(trial.TrialLostError):
            running.result()
    assert compiler.compile(source("sleep 0"))
    assert server._process is not process


def wait_for_child(process: psutil.Process) -> psutil.Process:
    """Of a process that has none yet."""
    while not (children := process.children()):
        time.sleep(0.01)
    return children[0]


def test_the_server_ends_with_its_owner_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = TriedCompiler(Path("unused"), 8, limit_s=LIMIT_S, num_threads=1)
    assert compiler.compile(source("sleep 0"))
    assert list(tmp_path.iterdir()) == []
    compiler._server._control.close()  # as the kernel does for an owner that is killed
    assert compiler._server._process.wait(10) == 0
