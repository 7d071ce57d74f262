"""The room where constrained requests wait: who leaves it, how, and what it remembers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from baleen_worker.grammar import room as room_module
from baleen_worker.grammar.room import Admitted, GrammarRoom, RefusedError
from baleen_worker.output import Output
from baleen_worker.request import Constraint, ErrorCode, FinishReason, Request, SamplingParams
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grammar:
    source: str
    memory_size_bytes: int = 100


class Anything:
    def accept(self, token_id: int) -> bool:
        return True

    def allowed(self) -> NDArray[np.int32]:
        return np.array([-1], dtype=np.int32)


class Compiler:
    """Compiles when `gate` is open; refuses "bad", breaks at "broken"."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[str] = []
        self.closed = False

    def compile(self, constraint: Constraint) -> Grammar:
        assert self.gate.wait(30)
        self.compiled.append(constraint.source)
        if constraint.source == "bad":
            raise RefusedError("it is bad")
        if constraint.source == "broken":
            raise MemoryError("secret")
        return Grammar(constraint.source)

    def match(self, grammar: Grammar, stop_ids: Sequence[int]) -> Anything:
        return Anything()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def room(compiler: Compiler) -> Iterator[GrammarRoom]:
    room = GrammarRoom(lambda: compiler, cache_bytes=250)
    yield room
    compiler.gate.set()
    room.close()


def make_request(key: int, source: str, *, stream: int = 1, deadline_ms: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=5, seed=0, stop_token_ids=(1,))
    return Request((stream, key), [1], sampling, deadline_ms=deadline_ms, constraint=Constraint("regex", source))


def empty(room: GrammarRoom) -> tuple[list[Admitted], list[Output]]:
    """Waits until everybody has left."""
    admitted: list[Admitted] = []
    outputs: list[Output] = []
    while len(room):
        room.wait(1.0)
        ready, ended = room.leave()
        admitted += ready
        outputs += ended
    return admitted, outputs


def test_requests_leave_with_a_guide(room: GrammarRoom) -> None:
    assert room.enter(make_request(1, "a"), 7.0) is None
    assert room.enter(make_request(2, "b"), 8.0) is None
    admitted, outputs = empty(room)
    assert outputs == []
    assert sorted((entry.request.id, entry.arrival_ms) for entry in admitted) == [((1, 1), 7.0), ((1, 2), 8.0)]
    assert all(entry.guide.mask() for entry in admitted)


def test_a_grammar_is_compiled_once_and_the_oldest_forgotten(room: GrammarRoom, compiler: Compiler) -> None:
    for key, source in enumerate("aabacab"):  # two of them fit
        room.enter(make_request(key, source), 0.0)
        empty(room)
    assert compiler.compiled == ["a", "b", "c", "b"]


def test_equal_constraints_that_come_together_are_compiled_once(room: GrammarRoom, compiler: Compiler) -> None:
    compiler.gate.clear()
    for key in range(6):
        room.enter(make_request(key, "a"), 0.0)
    compiler.gate.set()
    admitted, _ = empty(room)
    assert len(admitted) == 6
    assert compiler.compiled == ["a"]


def test_a_refusal_names_the_field_and_is_remembered(room: GrammarRoom, compiler: Compiler) -> None:
    for key in range(3):
        room.enter(make_request(key, "bad"), 0.0)
        _, (output,) = empty(room)
        assert output.error is not None
        assert (output.error.code, output.error.field) == (ErrorCode.INVALID_ARGUMENT, "regex")
        assert output.error.message == "regex: it is bad"
    assert compiler.compiled == ["bad"]


def test_a_compiler_that_breaks_fails_its_request_alone(room: GrammarRoom) -> None:
    room.enter(make_request(1, "broken"), 0.0)
    room.enter(make_request(2, "a"), 0.0)
    admitted, (output,) = empty(room)
    assert [entry.request.id for entry in admitted] == [(1, 2)]
    assert output.id == (1, 1)
    assert output.error is not None
    assert output.error.code is ErrorCode.INTERNAL
    assert "secret" not in output.error.message


def test_aborts_deadlines_and_ends_of_streams_reach_the_room(room: GrammarRoom, compiler: Compiler) -> None:
    compiler.gate.clear()
    room.enter(make_request(1, "a"), 0.0)
    room.enter(make_request(2, "b", deadline_ms=50), 100.0)
    room.enter(make_request(3, "c", stream=2), 0.0)
    room.enter(make_request(4, "d"), 0.0)
    assert room.abort((1, 9)) is None
    assert room.abort((1, 1)) == Output((1, 1), finish_reason=FinishReason.ABORT)
    assert room.expire(149.0) == []
    (late,) = room.expire(150.0)
    assert late.id == (1, 2)
    assert late.error is not None
    assert late.error.code is ErrorCode.DEADLINE_EXCEEDED
    room.abort_stream(2)
    assert len(room) == 1
    compiler.gate.set()
    admitted, outputs = empty(room)
    assert [entry.request.id for entry in admitted] == [(1, 4)]
    assert outputs == []


def test_a_key_in_use_and_a_full_room_are_refused(
    room: GrammarRoom, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "MAX_WAITING", 2)
    compiler.gate.clear()
    assert room.enter(make_request(1, "a"), 0.0) is None
    twice = room.enter(make_request(1, "b"), 0.0)
    assert twice is not None
    assert twice.error is not None
    assert twice.error.code is ErrorCode.INVALID_ARGUMENT
    assert room.enter(make_request(2, "b"), 0.0) is None
    full = room.enter(make_request(3, "c"), 0.0)
    assert full is not None
    assert full.error is not None
    assert full.error.code is ErrorCode.RESOURCE_EXHAUSTED


def test_closing_ends_the_compiler(compiler: Compiler) -> None:
    room = GrammarRoom(lambda: compiler, cache_bytes=100)
    room.close()
    assert not compiler.closed, "it was never made"
    room = GrammarRoom(lambda: compiler, cache_bytes=100)
    room.enter(make_request(1, "a"), 0.0)
    empty(room)
    room.close()
    assert compiler.closed
