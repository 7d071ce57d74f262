"""Follows one constrained answer token by token and says which tokens may come next.

A guide lives on the host, beside its sequence. It knows committed tokens only, so a preemption does not touch it: the
sequence is computed again, and the guide is still where it was.

A mask usually takes tens of microseconds and is made at once. Where a grammar counts (`maxLength`, `{1,10}`), a mask
of a large vocabulary can take tens of milliseconds: then the next ones are made in another thread, and the request
sits steps out until its mask is ready instead of holding up its neighbours.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

_SLOW_S = 0.0005


class TokenMatcher(Protocol):
    """Where an answer is in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Moves past a token; False when the grammar does not allow it here."""
        ...

    def allowed(self) -> NDArray[np.int32]:
        """Which tokens may come next, packed; good until the next call."""
        ...


class GuideError(Exception):
    """A token was sampled that the grammar does not allow, which a mask should have prevented."""


class Guide:
    """One answer's grammar, and how far the answer has come.

    `after_id`: the grammar begins after this token; None: at once. `min_tokens`: stop tokens are not allowed before so
    many tokens are out, unless the grammar allows nothing else. `defer` runs a function in another thread.
    """

    def __init__(
        self,
        matcher: TokenMatcher,
        *,
        stop_ids: Sequence[int],
        after_id: int | None = None,
        min_tokens: int = 0,
        defer: Callable[[Callable[[], bytes]], Future[bytes]] | None = None,
    ) -> None:
        self._matcher = matcher
        self._after_id = after_id
        self._min_tokens = min_tokens
        self._stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self._defer = defer
        self._num_tokens = 0
        self._is_slow = False
        self._pending: Future[bytes] | None = None
        self._mask = b"" if after_id is not None else self._make_mask()

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is known."""
        return self._pending is None or self._pending.done()

    @property
    def exhausted(self) -> bool:
        """Whether no token may come next, not even a stop token. Waits for the mask."""
        mask = self.mask()
        return mask != b"" and mask == bytes(len(mask))

    def mask(self) -> bytes:
        """What `PlannedRow.mask` wants for the next token; empty: any. Waits for it when it is not ready."""
        if self._pending is not None:
            self._mask = self._pending.result()
            self._pending = None
        return self._mask

    def advance(self, token_id: int) -> None:
        """One more token is committed. Raises GuideError."""
        self._pending = None
        self._accept(token_id)
        if self._after_id is not None:
            return
        if self._is_slow and self._defer is not None:
            self._pending = self._defer(self._make_mask)
        else:
            self._mask = self._make_mask()

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Takes in what an earlier attempt has told, before anything is asked of it. Raises GuideError."""
        for token_id in token_ids:
            self._accept(token_id)
        if self._after_id is None:
            self._mask = self._make_mask()

    def _accept(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._after_id is None:
            if not self._matcher.accept(token_id):
                raise GuideError(f"token {token_id} was sampled where the grammar does not allow it")
        elif token_id == self._after_id:
            self._after_id = None

    def _make_mask(self) -> bytes:
        """The mask of the next token."""
        started_s = time.thread_time()
        words = self._matcher.allowed()
        if self._num_tokens < self._min_tokens:
            words = self._without_stops(words)
        self._is_slow = time.thread_time() - started_s > _SLOW_S
        return words.tobytes()

    def _without_stops(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        kept = words.view(np.uint32).copy()
        bits = np.left_shift(np.uint32(1), (self._stop_ids % 32).astype(np.uint32))
        np.bitwise_and.at(kept, self._stop_ids // 32, ~bits)
        return kept.view(np.int32) if kept.any() else words


def first_allowed(mask: bytes, token_id: int, vocab_size: int) -> int:
    """The first id from `token_id` on, round the vocabulary, that a mask allows; for a runner without logits."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(bits)
    place = int(np.searchsorted(allowed, token_id))
    return int(allowed[place % len(allowed)])
