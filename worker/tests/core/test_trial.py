"""The limits of a trial: processor time, not time, and memory. A real server, and a compiler that uses up either."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import stubborn_compiler
from baleen_worker.grammar import trial
from baleen_worker.grammar.room import RefusedError, TriedCompiler
from baleen_worker.request import Constraint

LIMIT_S = 0.75
TRIAL_S = 0.3  # as much again is for the repetition, and something for the way there and back
# A timer of processor time goes off at a tick of the kernel, and ends what has just begun to be written down.
SLACK_S = 0.1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[TriedCompiler]:
    monkeypatch.setattr(trial, "_PROGRAM", (stubborn_compiler.__file__,))
    monkeypatch.setitem(sys.modules, "baleen_worker.grammar.backend", stubborn_compiler)
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
