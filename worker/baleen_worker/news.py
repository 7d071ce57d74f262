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
class Listeners:
    """Requests of one stream. `places`: where their tokens are among those of a step; None: these are all, in order.

    `keys` and `cached_tokens` hold one uint64 and one uint32 for each, as bytes.
    """

    stream: int
    count: int
    places: Ints | None
    keys: bytes
    cached_tokens: bytes


class Audience:
    """Requests that hear of a token each: of which stream, under which key, and how much of the prompt was cached.

    Steady decodes speak to the same ones step after step, so how they part into streams is worked out once.
    """

    __slots__ = ("_listeners", "cached_tokens", "keys", "streams")

    def __init__(self, streams: Ints, keys: NDArray[np.uint64], cached_tokens: Ints) -> None:
        self.streams = streams
        self.keys = keys
        self.cached_tokens = cached_tokens
        self._listeners: list[Listeners] | None = None

    def by_stream(self) -> list[Listeners]:
        """Each stream's part, in the same order."""
        if self._listeners is None:
            streams = np.unique(self.streams).tolist()
            alone = len(streams) == 1
            self._listeners = [
                self._part(stream, None if alone else np.flatnonzero(self.streams == stream)) for stream in streams
            ]
        return self._listeners

    def _part(self, stream: int, places: Ints | None) -> Listeners:
        every = slice(None) if places is None else places
        keys, cached_tokens = self.keys[every], self.cached_tokens[every]
        return Listeners(stream, len(keys), places, keys.tobytes(), cached_tokens.astype(np.uint32).tobytes())


@dataclass(frozen=True, slots=True)
class TokenNews:
    """Requests that each got one token and go on."""

    audience: Audience
    token_ids: Ints

    def outputs(self) -> Iterator[Output]:
        """The same, one by one."""
        told = self.audience
        columns = [column.tolist() for column in (told.streams, told.keys, self.token_ids, told.cached_tokens)]
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
