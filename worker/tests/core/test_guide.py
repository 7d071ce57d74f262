"""A guide follows its answer: when it begins, what may come next, and when nothing may."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from baleen_worker.grammar.guide import Guide, GuideError, first_allowed
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

VOCAB = 70


def packed(ids: Sequence[int]) -> NDArray[np.int32]:
    words = -(-VOCAB // 32)
    return np.frombuffer(sum(1 << token for token in set(ids)).to_bytes(words * 4, "little"), dtype=np.int32)


class Script:
    """A grammar of one line: at place i the ids `choices[i]` are allowed. Making a mask may take time."""

    def __init__(self, *choices: Sequence[int], slow_s: float = 0.0) -> None:
        self.choices = choices
        self.place = 0
        self.slow_s = slow_s

    def accept(self, token_id: int) -> bool:
        allowed = self.place < len(self.choices) and token_id in self.choices[self.place]
        self.place += allowed
        return allowed

    def allowed(self) -> NDArray[np.int32]:
        until_s = time.thread_time() + self.slow_s
        while time.thread_time() < until_s:
            pass
        return packed(self.choices[self.place] if self.place < len(self.choices) else ())


def ids_of(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_it_follows_the_grammar_from_the_first_token() -> None:
    guide = Guide(Script([3, 4], [5], [1]), stop_ids=[1])
    assert ids_of(guide.mask()) == [3, 4]
    guide.advance(4)
    assert ids_of(guide.mask()) == [5]
    guide.advance(5)
    assert ids_of(guide.mask()) == [1]
    assert not guide.exhausted


def test_it_begins_after_a_mark() -> None:
    guide = Guide(Script([3], [1]), stop_ids=[1], after_id=9)
    for token_id in (7, 3, 8):
        assert guide.mask() == b""
        guide.advance(token_id)
    guide.advance(9)
    assert ids_of(guide.mask()) == [3]
    guide.advance(3)
    assert ids_of(guide.mask()) == [1]


def test_a_token_outside_the_grammar_is_an_error() -> None:
    guide = Guide(Script([3], [1]), stop_ids=[1])
    with pytest.raises(GuideError, match="token 4"):
        guide.advance(4)


def test_an_answer_that_leads_nowhere_is_exhausted() -> None:
    guide = Guide(Script([3]), stop_ids=[1])
    guide.advance(3)
    assert guide.ready
    assert guide.exhausted


def test_stop_tokens_wait_for_min_tokens_unless_nothing_else_is_left() -> None:
    guide = Guide(Script([1, 3, 40], [1, 40], [1], [1, 3]), stop_ids=[1, 40], min_tokens=3)
    assert ids_of(guide.mask()) == [3]
    guide.advance(3)
    assert ids_of(guide.mask()) == [1, 40], "the grammar allows nothing but an end"
    guide.advance(1)
    assert ids_of(guide.mask()) == [1]
    guide.advance(1)
    assert ids_of(guide.mask()) == [1, 3], "three tokens are out"


def test_slow_masks_are_made_elsewhere() -> None:
    deferred: list[tuple[Callable[[], bytes], Future[bytes]]] = []

    def defer(make: Callable[[], bytes]) -> Future[bytes]:
        deferred.append((make, Future()))
        return deferred[-1][1]

    script = Script([3], [4], [5], [6], slow_s=0.005)
    guide = Guide(script, stop_ids=[1], defer=defer)
    assert guide.ready
    guide.advance(3)
    assert not guide.ready
    make, future = deferred[0]
    future.set_result(make())
    assert guide.ready
    assert ids_of(guide.mask()) == [4]
    script.slow_s = 0.0
    guide.advance(4)
    assert not guide.ready, "the last one was slow"
    make, future = deferred[1]
    future.set_result(make())
    guide.advance(5)
    assert len(deferred) == 2, "the last one was fast"
    assert ids_of(guide.mask()) == [6]


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1), st.integers(0, VOCAB - 1))
def test_the_first_allowed_token_goes_round(ids: set[int], start: int) -> None:
    expected = next(token for token in [*range(start, VOCAB), *range(start)] if token in ids)
    assert first_allowed(packed(sorted(ids)).tobytes(), start, VOCAB) == expected
