"""What a committed step has to tell: outputs, and columns for the many requests that got one token and go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baleen_worker.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenNews:
    """Requests that each got one token and go on: of which stream, under which key, what, and how much was cached."""

    streams: Ints
    keys: NDArray[np.uint64]
    token_ids: Ints
    cached_tokens: Ints

    def by_stream(self) -> Iterator[tuple[int, TokenNews]]:
        """Each stream's part, in the same order."""
        first = int(self.streams[0])
        if (self.streams == first).all():
            yield first, self
            return
        for stream in np.unique(self.streams).tolist():
            own = np.flatnonzero(self.streams == stream)
            yield stream, TokenNews(self.streams[own], self.keys[own], self.token_ids[own], self.cached_tokens[own])

    def outputs(self) -> Iterator[Output]:
        """The same, one by one."""
        columns = [c.tolist() for c in (self.streams, self.keys, self.token_ids, self.cached_tokens)]
        for stream, key, token_id, cached_tokens in zip(*columns, strict=True):
            yield Output((stream, key), [token_id], cached_tokens=cached_tokens)


@dataclass(slots=True)
class News:
    """In order: `outputs`, then `tokens`, whose requests have none among the outputs of the same step."""

    outputs: list[Output] = field(default_factory=list[Output])
    tokens: TokenNews | None = None

    def __bool__(self) -> bool:
        return bool(self.outputs) or self.tokens is not None

    def __iter__(self) -> Iterator[Output]:
        yield from self.outputs
        if self.tokens is not None:
            yield from self.tokens.outputs()

    def tell(self, outputs: Iterable[Output]) -> None:
        """Adds what happened next."""
        self._unpack()
        self.outputs += outputs

    def follow(self, later: News) -> None:
        """Adds the news of a later step."""
        self.tell(later.outputs)
        self.tokens = later.tokens

    def _unpack(self) -> None:
        if self.tokens is not None:
            self.outputs += self.tokens.outputs()
            self.tokens = None
