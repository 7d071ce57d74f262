"""The Connect streams of one head: numbering, pacing and end of each, and which keys are live on it.

A stream's frames wait in a queue that only its own writer empties, so a slow gateway delays nobody else. When a frame
has waited for STALL_S the stream ends, whether its reader stopped or is merely too slow: that also bounds the queue.
Knows nothing of what frames contain beyond their envelope.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

import grpc

from baleen_worker.pb import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

STALL_S = 10.0
LOAD_INTERVAL_S = 1.0
_TICK_S = 0.25


class StreamEndedError(Exception):
    """The stream must end with a status; the message is for the peer."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Stream:
    """One gateway's stream. `number` is unique for the life of the head; `live` are the keys without a final row."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: set[int] = set()
        self.welcomed = False
        self._outgoing: deque[tuple[float, pb.WorkerFrame]] = deque()
        self._wake = asyncio.Event()
        self._sequence = 0
        self._last_load_s = 0.0
        self._writing_since_s: float | None = None
        self._closing: StreamEndedError | None = None
        self._ended: asyncio.Future[StreamEndedError | None] = asyncio.get_running_loop().create_future()

    def send(self, frame: pb.WorkerFrame) -> None:
        """Queues a frame; the stream numbers it."""
        now_s = time.monotonic()
        self._sequence += 1
        frame.sequence = self._sequence
        if frame.HasField("load"):
            self._last_load_s = now_s
        self._outgoing.append((now_s, frame))
        self._wake.set()

    def wants_load(self) -> bool:
        """Whether a load report is due."""
        return self.welcomed and time.monotonic() - self._last_load_s >= LOAD_INTERVAL_S

    def stalled(self) -> bool:
        """Whether a frame has waited too long for the gateway to take it."""
        return self._writing_since_s is not None and time.monotonic() - self._writing_since_s > STALL_S

    def end(self, error: StreamEndedError | None) -> None:
        """Ends the stream now; frames that wait are lost with it. None: with status OK."""
        if not self._ended.done():
            self._ended.set_result(error)

    def close(self, error: StreamEndedError) -> None:
        """Ends the stream once all queued frames are written."""
        self._closing = error
        self._wake.set()

    async def serve(
        self,
        frames: AsyncIterator[pb.GatewayFrame],
        write: Callable[[pb.WorkerFrame], Awaitable[None]],
        handle: Callable[[pb.GatewayFrame], Awaitable[None]],
    ) -> None:
        """Runs both directions until either ends. Raises StreamEndedError, or returns when the gateway is done."""
        tasks = [asyncio.create_task(self._read(frames, handle)), asyncio.create_task(self._write(write))]
        try:
            error = await self._ended
        finally:
            for task in tasks:
                task.cancel()
        if error is not None:
            raise error

    async def _read(
        self, frames: AsyncIterator[pb.GatewayFrame], handle: Callable[[pb.GatewayFrame], Awaitable[None]]
    ) -> None:
        expected = 0
        error: StreamEndedError | None = None
        try:
            async for frame in frames:
                expected += 1
                if frame.sequence != expected:
                    raise StreamEndedError(
                        grpc.StatusCode.INVALID_ARGUMENT, f"frame {frame.sequence} came where {expected} was due"
                    )
                if frame.HasField("hello") != (expected == 1):
                    raise StreamEndedError(
                        grpc.StatusCode.INVALID_ARGUMENT, "hello belongs to the first frame, and only there"
                    )
                await handle(frame)
        except StreamEndedError as ended:
            error = ended
        finally:
            self.end(error)

    async def _write(self, write: Callable[[pb.WorkerFrame], Awaitable[None]]) -> None:
        try:
            while True:
                while self._outgoing:
                    self._writing_since_s, frame = self._outgoing.popleft()
                    await write(frame)
                self._writing_since_s = None
                if self._closing is not None:
                    self.end(self._closing)
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.end(None)  # a write fails only when the gateway is gone


class Streams:
    """All streams that are open, and the clock that watches them."""

    def __init__(self) -> None:
        self._open: dict[int, Stream] = {}
        self._num_opened = 0
        self.closed: StreamEndedError | None = None  # why no stream may be opened any more

    def open(self) -> Stream:
        """A new stream under a number that was never used."""
        self._num_opened += 1
        stream = self._open[self._num_opened] = Stream(self._num_opened)
        return stream

    def forget(self, stream: Stream) -> None:
        """The stream is over."""
        self._open.pop(stream.number, None)

    def find(self, number: int) -> Stream | None:
        """The stream of that number, while it is open."""
        return self._open.get(number)

    @property
    def all(self) -> list[Stream]:
        """Streams that have exchanged greetings."""
        return [stream for stream in self._open.values() if stream.welcomed]

    @property
    def num_live(self) -> int:
        """Requests without a final row, over all streams."""
        return sum(len(stream.live) for stream in self._open.values())

    async def watch(self, load: Callable[[], pb.LoadReport]) -> None:
        """Cuts stalled streams off and keeps load reports coming; runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            for stream in self.all:
                if stream.stalled():
                    message = f"no frame was read for {STALL_S:g} s"
                    stream.end(StreamEndedError(grpc.StatusCode.DEADLINE_EXCEEDED, message))
                elif stream.wants_load():
                    stream.send(pb.WorkerFrame(load=load()))

    async def close_all(self, error: StreamEndedError, timeout_s: float) -> None:
        """Writes what is queued, then ends every stream; waits for that at most `timeout_s`. None opens after it."""
        self.closed = error
        for stream in self._open.values():
            stream.close(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    await asyncio.sleep(0.01)
