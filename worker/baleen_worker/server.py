"""The gRPC face of a worker: converts between the contract's messages and Request/Output, and decides nothing else.

Handlers are registered by name, so no generated service code is needed. `rank` is whatever carries commands to the
rank; what comes back enters through the methods `on_…`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from baleen_worker.kv_events import to_contract
from baleen_worker.limits import InvalidSubmitError, ModelFacts, check_peer, to_request
from baleen_worker.messages import (
    Abort,
    AbortStream,
    Command,
    Flush,
    Flushed,
    LogprobColumns,
    PeerTried,
    StepDone,
    StreamColumns,
    Submit,
    Survey,
    Surveyed,
    TryPeer,
)
from baleen_worker.output import Load, RequestError
from baleen_worker.pb import worker_pb2 as pb
from baleen_worker.request import ErrorCode, Request, Role
from baleen_worker.streams import Stream, StreamEndedError, Streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Context = grpc.aio.ServicerContext[Any, Any]

PROTOCOL_VERSION = 1
SERVICE_NAME = "baleen.worker.v1.Worker"
TOKENIZER_CHUNK_BYTES = 256 * 1024
_MAX_TOLD_PAGES = 64 * 1024  # half a MiB a frame
_MAX_PROBES = 64  # each holds a connection

logger = logging.getLogger(__name__)


class RankLink(Protocol):
    """Carries commands to the rank."""

    async def send(self, command: Command) -> None:
        """Queues one command."""
        ...


@dataclass(slots=True)
class WorkerState:
    """What the handlers answer from. The head fills `info` and `model` in when the rank is ready."""

    boot_epoch: int
    files: dict[int, Path]
    page_size: int
    info: pb.GetInfoResponse | None = None
    model: ModelFacts | None = None
    load: Load = field(default_factory=Load)
    draining: bool = False


class WorkerService:
    """Handlers of `baleen.worker.v1.Worker`."""

    def __init__(self, state: WorkerState, streams: Streams, rank: RankLink) -> None:
        self._state = state
        self._streams = streams
        self._rank = rank
        self._flushes: dict[int, asyncio.Future[int | None]] = {}
        self._probes: dict[int, asyncio.Future[PeerTried]] = {}
        self._num_tickets = 0
        self._num_kv_events = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """All methods, to be added to a grpc.aio server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "GetInfo": grpc.unary_unary_rpc_method_handler(
                    self.get_info, pb.GetInfoRequest.FromString, pb.GetInfoResponse.SerializeToString
                ),
                "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                    self.get_tokenizer, pb.GetTokenizerRequest.FromString, pb.TokenizerChunk.SerializeToString
                ),
                "Connect": grpc.stream_stream_rpc_method_handler(
                    self.connect, pb.GatewayFrame.FromString, pb.WorkerFrame.SerializeToString
                ),
                "FlushCache": grpc.unary_unary_rpc_method_handler(
                    self.flush_cache, pb.FlushCacheRequest.FromString, pb.FlushCacheResponse.SerializeToString
                ),
                "ProbeTransfer": grpc.unary_unary_rpc_method_handler(
                    self.probe_transfer, pb.ProbeTransferRequest.FromString, pb.ProbeTransferResponse.SerializeToString
                ),
            },
        )

    # --- RPCs -----------------------------------------------------------------------------------------------------

    async def get_info(self, _: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        info = self._state.info
        if info is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        return info

    async def get_tokenizer(self, _: pb.GetTokenizerRequest, context: Context) -> AsyncIterator[pb.TokenizerChunk]:
        if pb.TOKENIZER_FILE_TOKENIZER not in self._state.files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the model folder has no tokenizer.json")
        for kind, path in self._state.files.items():
            data = path.read_bytes()
            for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
                end = start + TOKENIZER_CHUNK_BYTES
                yield pb.TokenizerChunk(file=kind, data=data[start:end], last=end >= len(data))  # pyright: ignore[reportArgumentType]

    async def connect(self, frames: AsyncIterator[pb.GatewayFrame], context: Context) -> None:
        if self._state.model is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        if self._streams.closed is not None:
            await context.abort(self._streams.closed.code, self._streams.closed.message)
        stream = self._streams.open()
        # Headers go first and alone: a status must not overtake them when a stream ends before its first frame is out.
        await context.send_initial_metadata(())
        try:
            await stream.serve(frames, context.write, lambda frame: self._handle(stream, frame))
        except StreamEndedError as ended:
            level = logging.WARNING if self._streams.closed is None else logging.INFO
            logger.log(level, "stream %d ends: %s", stream.number, ended.message)
            await self._forget(stream)
            await context.abort(ended.code, ended.message)
        finally:
            await self._forget(stream)

    async def flush_cache(self, _: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        if self._state.model is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        ticket = self._new_ticket()
        answer = self._flushes[ticket] = asyncio.get_running_loop().create_future()
        await self._rank.send(Flush(ticket))
        freed_pages = await answer
        if freed_pages is None:
            message = "requests are running or waiting: retry when none is"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        return pb.FlushCacheResponse(freed_pages=freed_pages)

    async def probe_transfer(self, request: pb.ProbeTransferRequest, context: Context) -> pb.ProbeTransferResponse:
        model = self._state.model
        if model is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        if model.role is not Role.DECODE:
            message = f"this is a {model.role.name.lower()} worker, to which no pages come: ask a decode worker"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            check_peer("peer", request.peer)
        except InvalidSubmitError as invalid:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"peer: {invalid.error.message}")
        if len(self._probes) >= _MAX_PROBES:
            message = f"{_MAX_PROBES} trials are under way: retry when one has ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        ticket = self._new_ticket()
        answer = self._probes[ticket] = asyncio.get_running_loop().create_future()
        peer = request.peer
        await self._rank.send(TryPeer(ticket, peer.address, request.peer_boot_epoch, peer.dp_rank))
        tried = await answer
        return pb.ProbeTransferResponse(duration_us=round(1e6 * tried.seconds), failure=tried.failure or "")

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    # --- news from the rank ---------------------------------------------------------------------------------------

    def on_step(self, event: StepDone) -> None:
        """Sends each stream its part of a step, and what has changed in the prefix cache."""
        self._state.load = event.load
        kv_events = to_contract(event.cache_events, self._num_kv_events + 1, self._state.page_size)
        self._num_kv_events += len(kv_events)
        if kv_events:
            moved = {columns.stream for columns in event.streams}
            for stream in self._streams.all:
                if stream.number not in moved:
                    stream.send(pb.WorkerFrame(kv_events=kv_events))
        for columns in event.streams:
            stream = self._streams.find(columns.stream)
            if stream is None:
                continue
            frame = step_frame(event.step, columns, event.load)
            frame.kv_events.extend(kv_events)
            stream.send(frame)
            stream.live.difference_update(
                key for key, reason in zip(columns.keys, columns.finish_reasons, strict=True) if reason
            )
            stream.live.difference_update(key for key, _ in columns.errors)

    def on_flushed(self, event: Flushed) -> None:
        """Answers the FlushCache call that asked."""
        answer = self._flushes.pop(event.ticket)
        if not answer.done():
            answer.set_result(event.freed_pages)

    def on_peer_tried(self, event: PeerTried) -> None:
        """Answers the ProbeTransfer call that asked."""
        answer = self._probes.pop(event.ticket)
        if not answer.done():
            answer.set_result(event)

    def on_surveyed(self, event: Surveyed) -> None:
        """Tells a new stream what is cached."""
        stream = self._streams.find(event.stream)
        if stream is None:
            return
        for start in range(0, len(event.page_hashes), _MAX_TOLD_PAGES):
            told = event.page_hashes[start : start + _MAX_TOLD_PAGES]
            stored = pb.KvStored(page_hashes=told, page_size_tokens=self._state.page_size)
            stream.send(pb.WorkerFrame(kv_events=[pb.KvEvent(stored=stored)]))

    def drain(self) -> None:
        """Accepts no submit from now on, and says so on every stream."""
        self._state.draining = True
        for stream in self._streams.all:
            stream.send(pb.WorkerFrame(draining=True))

    def load_report(self) -> pb.LoadReport:
        """The rank's latest load."""
        return _load_report(self._state.load)

    # --- one frame of a gateway -----------------------------------------------------------------------------------

    async def _handle(self, stream: Stream, frame: pb.GatewayFrame) -> None:
        if frame.HasField("hello"):
            self._welcome(stream, frame.hello)
            await self._rank.send(Survey(stream.number))
        if frame.submits:
            await self._submit(stream, frame)
        if frame.aborts:
            await self._rank.send(Abort([(stream.number, abort.key) for abort in frame.aborts]))
        if frame.HasField("heartbeat"):
            stream.send(pb.WorkerFrame(heartbeat=frame.heartbeat))

    def _welcome(self, stream: Stream, hello: pb.Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            message = f"this worker speaks version {PROTOCOL_VERSION} of the contract, not {hello.protocol_version}"
            raise StreamEndedError(grpc.StatusCode.FAILED_PRECONDITION, message)
        logger.info("stream %d: gateway %s", stream.number, hello.gateway_id or "without a name")
        stream.welcomed = True
        stream.send(
            pb.WorkerFrame(
                welcome=pb.Welcome(protocol_version=PROTOCOL_VERSION, boot_epoch=self._state.boot_epoch),
                load=self.load_report(),
                draining=self._state.draining,
            )
        )

    async def _submit(self, stream: Stream, frame: pb.GatewayFrame) -> None:
        model = self._state.model
        assert model is not None, "a stream is open before the model is known"
        requests: list[Request] = []
        errors: list[tuple[int, RequestError]] = []
        for submit in frame.submits:
            if submit.key in stream.live:
                message = f"key {submit.key} names a request that still runs"
                raise StreamEndedError(grpc.StatusCode.INVALID_ARGUMENT, message)
            if self._state.draining:
                error = RequestError(ErrorCode.UNAVAILABLE, "the worker is shutting down: send it to another one")
                errors.append((submit.key, error))
                continue
            try:
                requests.append(to_request(submit, stream.number, model))
            except InvalidSubmitError as invalid:
                errors.append((submit.key, invalid.error))
            else:
                stream.live.add(submit.key)
                logger.debug(
                    "stream %d, key %d: request %s, attempt %d, trace %s",
                    *(stream.number, submit.key, submit.request_id.hex(), submit.attempt, submit.trace_parent or "-"),
                )
        if requests:
            await self._rank.send(Submit(requests))
        if errors:
            stream.send(_errors_frame(errors))

    async def _forget(self, stream: Stream) -> None:
        if self._streams.find(stream.number) is not None:
            self._streams.forget(stream)
            await self._rank.send(AbortStream(stream.number))


def step_frame(step: int, columns: StreamColumns, load: Load) -> pb.WorkerFrame:
    """One step's news of one stream as a frame, not yet numbered."""
    frame = pb.WorkerFrame(load=_load_report(load))
    if columns.keys:
        rows = frame.step
        rows.step = step
        rows.keys.extend(columns.keys)
        rows.token_counts.extend(columns.token_counts)
        rows.token_ids.extend(columns.token_ids)
        rows.finish_reasons.extend(columns.finish_reasons)  # pyright: ignore[reportArgumentType] - plain numbers
        rows.cached_tokens.extend(columns.cached_tokens)
        if columns.logprobs is not None:
            _fill_logprobs(rows.logprobs, columns.logprobs)
        if columns.prompt_logprobs is not None:
            _fill_logprobs(rows.prompt_logprobs, columns.prompt_logprobs)
    _fill_errors(frame, columns.errors)
    return frame


def _fill_logprobs(into: pb.LogprobColumns, columns: LogprobColumns) -> None:
    into.rows.extend(columns.rows)
    into.counts.extend(columns.counts)
    into.token_ids.extend(columns.token_ids)
    into.logprobs.extend(columns.logprobs)
    into.top_counts.extend(columns.top_counts)
    into.top_token_ids.extend(columns.top_token_ids)
    into.top_logprobs.extend(columns.top_logprobs)


def _errors_frame(errors: list[tuple[int, RequestError]]) -> pb.WorkerFrame:
    frame = pb.WorkerFrame()
    _fill_errors(frame, errors)
    return frame


def _fill_errors(frame: pb.WorkerFrame, errors: list[tuple[int, RequestError]]) -> None:
    for key, error in errors:
        frame.errors.add(key=key, code=error.code.value, field=error.field, message=error.message)  # pyright: ignore[reportArgumentType]


def _load_report(load: Load) -> pb.LoadReport:
    return pb.LoadReport(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        used_pages=load.used_pages,
        total_pages=load.total_pages,
        waiting_prompt_tokens=load.waiting_prompt_tokens,
        steps=load.steps,
        generated_tokens=load.generated_tokens,
        prompt_tokens=load.prompt_tokens,
        cached_pages=load.cached_pages,
        cached_tokens=load.cached_tokens,
        preemptions=load.preemptions,
        dp_rank=0,
    )
