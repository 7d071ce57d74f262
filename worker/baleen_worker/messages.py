"""What head and rank tell each other: plain data, one message a frame. How it travels is `wire.py`'s business.

Field order is the wire format between two processes of one installation, never between versions.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.cache.events import CacheEvent
from baleen_worker.output import Load, Output, RequestError
from baleen_worker.packed import Column
from baleen_worker.request import Request, RequestId
from baleen_worker.step import TokenLogprobs

if TYPE_CHECKING:
    from baleen_worker.news import Listeners, News  # which imports numpy, and the head can do without

# --- head to rank -----------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Requests to be queued, in order."""

    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Requests to be ended; unknown ones are not an error."""

    ids: list[RequestId]


class AbortStream(msgspec.Struct, frozen=True, array_like=True, tag="abort_stream"):
    """A Connect stream is gone, and its requests with it."""

    stream: int


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Drop cached pages. Answered by a `Flushed` with the same ticket."""

    ticket: int


class Survey(msgspec.Struct, frozen=True, array_like=True, tag="survey"):
    """A new stream wants to know what is cached. Answered by a `Surveyed`."""

    stream: int


class TryPeer(msgspec.Struct, frozen=True, array_like=True, tag="try_peer"):
    """Would pages come from this rank of a prefill worker? Answered by a `PeerTried` with the same ticket."""

    ticket: int
    address: str
    boot_epoch: int
    dp_rank: int


Command = Submit | Abort | AbortStream | Flush | Survey | TryPeer

# --- rank to head -----------------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of reading the weights."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded; what it can hold."""

    device: str
    dtype: str
    layout_id: str
    capacity_pages: int
    weights_bytes: int
    kv_bytes: int
    load_seconds: float
    features: tuple[str, ...] = ()
    transfer_address: str | None = None


class LogprobColumns(msgspec.Struct, array_like=True, gc=False):
    """Columns of `baleen.worker.v1.LogprobColumns`."""

    rows: list[int] = msgspec.field(default_factory=list[int])
    counts: list[int] = msgspec.field(default_factory=list[int])
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    logprobs: list[float] = msgspec.field(default_factory=list[float])
    top_counts: list[int] = msgspec.field(default_factory=list[int])
    top_token_ids: list[int] = msgspec.field(default_factory=list[int])
    top_logprobs: list[float] = msgspec.field(default_factory=list[float])

    def append(self, row: int, described: TokenLogprobs) -> None:
        """Adds the tokens of one row."""
        self.rows.append(row)
        self.counts.append(len(described.token_ids))
        self.token_ids += described.token_ids
        self.logprobs += described.logprobs
        for ids, logprobs in zip(described.top_token_ids, described.top_logprobs, strict=True):
            self.top_counts.append(len(ids))
            self.top_token_ids += ids
            self.top_logprobs += logprobs


class StreamColumns(msgspec.Struct, array_like=True, gc=False):
    """The rows of one Connect stream in one step, as parallel arrays; `finish_reasons` 0: the request goes on.

    The arrays travel as their bytes. `errors` are (key, error) pairs; a failed request has no row.
    """

    stream: int
    keys: Column = msgspec.field(default_factory=lambda: array("Q"))
    token_counts: Column = msgspec.field(default_factory=lambda: array("H"))
    token_ids: Column = msgspec.field(default_factory=lambda: array("I"))
    finish_reasons: Column = msgspec.field(default_factory=lambda: array("B"))
    cached_tokens: Column = msgspec.field(default_factory=lambda: array("I"))
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    errors: list[tuple[int, RequestError]] = msgspec.field(default_factory=list[tuple[int, RequestError]])

    def append(self, output: Output) -> None:
        """One more row, or error."""
        key = output.id[1]
        if output.error is not None:
            self.errors.append((key, output.error))
            return
        if output.logprobs is not None:
            self.logprobs = self.logprobs or LogprobColumns()
            self.logprobs.append(len(self.keys), output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs or LogprobColumns()
            self.prompt_logprobs.append(len(self.keys), output.prompt_logprobs)
        self.keys.append(key)
        self.token_counts.append(len(output.token_ids))
        self.token_ids.extend(output.token_ids)
        self.finish_reasons.append(output.finish_reason or 0)
        self.cached_tokens.append(output.cached_tokens)

    def extend(self, listeners: Listeners, token_ids: bytes) -> None:
        """Rows of requests of this stream that each got one token, an uint32 of `token_ids`, and go on."""
        self.keys.frombytes(listeners.keys)
        self.token_counts += array("H", [1]) * listeners.count
        self.token_ids.frombytes(token_ids)
        self.finish_reasons.frombytes(bytes(listeners.count))
        self.cached_tokens.frombytes(listeners.cached_tokens)


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that one turn of the engine changed. `step` is the last one executed, also when this turn had none."""

    step: int
    streams: list[StreamColumns]
    load: Load
    cache_events: list[CacheEvent] = msgspec.field(default_factory=list[CacheEvent])


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """Answer to a `Flush`; None: refused, because requests are live."""

    ticket: int
    freed_pages: int | None


class Surveyed(msgspec.Struct, frozen=True, array_like=True, tag="surveyed"):
    """Answer to a `Survey`: every cached page, each after the page before it."""

    stream: int
    page_hashes: list[int]


class PeerTried(msgspec.Struct, frozen=True, array_like=True, tag="peer_tried"):
    """Answer to a `TryPeer`: a page has come, in so many seconds; or why not."""

    ticket: int
    seconds: float
    failure: str | None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The rank cannot go on; it exits after this."""

    message: str


Event = Loading | Ready | StepDone | Flushed | Surveyed | PeerTried | Fatal


def to_columns(news: News) -> list[StreamColumns]:
    """News by stream, each stream's in order. An output with an error contributes the error only."""
    by_stream: dict[int, StreamColumns] = {}
    for output in news.outputs:
        stream = output.id[0]
        if stream not in by_stream:
            by_stream[stream] = StreamColumns(stream)
        by_stream[stream].append(output)
    if news.tokens is not None:
        token_ids = news.tokens.token_ids.astype("I")
        for listeners in news.tokens.audience.by_stream():
            stream, places = listeners.stream, listeners.places
            own = token_ids if places is None else token_ids[places]
            by_stream.setdefault(stream, StreamColumns(stream)).extend(listeners, own.tobytes())
    return list(by_stream.values())
