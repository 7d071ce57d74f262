"""What head and rank tell each other: plain data, one message a frame. How it travels is `wire.py`'s business.

Field order is the wire format between two processes of one installation, never between versions.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from baleen_worker.cache.events import CacheEvent
from baleen_worker.output import Load, Output, RequestError
from baleen_worker.request import Request, RequestId
from baleen_worker.step import TokenLogprobs

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


Command = Submit | Abort | AbortStream | Flush

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

    `errors` are (key, error) pairs; a failed request has no row.
    """

    stream: int
    keys: list[int] = msgspec.field(default_factory=list[int])
    token_counts: list[int] = msgspec.field(default_factory=list[int])
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    finish_reasons: list[int] = msgspec.field(default_factory=list[int])
    cached_tokens: list[int] = msgspec.field(default_factory=list[int])
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    errors: list[tuple[int, RequestError]] = msgspec.field(default_factory=list[tuple[int, RequestError]])


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


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The rank cannot go on; it exits after this."""

    message: str


Event = Loading | Ready | StepDone | Flushed | Fatal


def to_columns(outputs: Iterable[Output]) -> list[StreamColumns]:
    """Outputs by stream, each stream's in order. An output with an error contributes the error only."""
    by_stream: dict[int, StreamColumns] = {}
    for output in outputs:
        stream, key = output.id
        columns = by_stream.get(stream)
        if columns is None:
            columns = by_stream[stream] = StreamColumns(stream)
        if output.error is not None:
            columns.errors.append((key, output.error))
            continue
        token_ids = output.token_ids
        if output.logprobs is not None:
            columns.logprobs = columns.logprobs or LogprobColumns()
            columns.logprobs.append(len(columns.keys), output.logprobs)
        if output.prompt_logprobs is not None:
            columns.prompt_logprobs = columns.prompt_logprobs or LogprobColumns()
            columns.prompt_logprobs.append(len(columns.keys), output.prompt_logprobs)
        columns.keys.append(key)
        columns.token_counts.append(len(token_ids))
        columns.token_ids += token_ids
        columns.finish_reasons.append(output.finish_reason or 0)
        columns.cached_tokens.append(output.cached_tokens)
    return list(by_stream.values())
