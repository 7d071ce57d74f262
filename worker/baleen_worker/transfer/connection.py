"""One socket of a transfer: frames and pages in, a queue of what goes out, and staging memory for pages.

Pages in host memory go between socket and pool without a copy in between; others pass through staging memory.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.messages import FromDecode, FromPrefill
from baleen_worker.transfer.receiving import WINDOW

_NUM_BUFFERS = 8
_BACKLOG = 128

# One system call moves so much: it is hashed while it is still in the processor's cache.
_CALL_BYTES = 512 << 10
# So many views go into one system call at most.
_VIEWS_PER_CALL = 128
# A reader of pages is woken when so much has come, or all that is left.
_WAKE_BYTES = 1 << 20

# Writes an answer with pages when it is its turn.
Answer = Callable[[], Awaitable[None]]


class Buffers:
    """Staging memory: a few buffers that are lent for one read at a time, and one of the loop's own."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: list[memoryview] = []
        self._lent = asyncio.Semaphore(_NUM_BUFFERS)
        self.own = memoryview(bytearray(num_bytes))

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[memoryview]:
        """A buffer, when one is free."""
        async with self._lent:
            buffer = self._free.pop() if self._free else memoryview(bytearray(self._num_bytes))
            try:
                yield buffer
            finally:
                self._free.append(buffer)


class Walk:
    """How far a list of views has been read or written."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.num_done = 0  # views
        self._views = views
        self._ends = list(itertools.accumulate(map(len, views)))
        self._at = 0  # bytes

    @property
    def num_left(self) -> int:
        """Bytes."""
        return self._ends[-1] - self._at

    def batch(self) -> list[memoryview]:
        """What comes next, as much as one system call takes; empty at the end."""
        first = self.num_done
        end = bisect.bisect_left(self._ends, self._at + _CALL_BYTES, first, len(self._ends)) + 1
        batch = [*self._views[first : min(end, first + _VIEWS_PER_CALL)]]
        if batch and (left := self._ends[first] - self._at) < len(batch[0]):
            batch[0] = batch[0][-left:]
        return batch

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are done."""
        self._at += num_bytes
        self.num_done = bisect.bisect_right(self._ends, self._at, self.num_done)


@dataclass(eq=False, slots=True)
class Connection:
    """`patience_s`: how long a peer may take for one thing that is written. Whoever opened it closes it."""

    loop: asyncio.AbstractEventLoop
    socket: socket.socket
    name: str
    patience_s: float
    since_s: float = field(default_factory=time.monotonic)
    _queue: deque[bytes | Answer] = field(default_factory=deque[bytes | Answer])
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_idle: bool = False
    _finishing: bool = False
    _wakes_at: int = 1

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, message: FromDecode | FromPrefill) -> None:
        """Queues a frame, or what of it cannot be written at once when nothing is queued."""
        frame = wire.encode(message)
        if self._is_idle and not self._queue:
            with contextlib.suppress(OSError):  # the writer will meet it too
                frame = frame[self.socket.send(frame) :]
        if frame:
            self._queue.append(frame)
            self._wake.set()

    def send_pages(self, answer: Answer) -> None:
        """Queues the answer to a read. Raises ProtocolError when too many wait already."""
        if sum(not isinstance(entry, bytes) for entry in self._queue) > WINDOW:
            raise ProtocolError("it asks for more pages than it takes")
        self._queue.append(answer)
        self._wake.set()

    def finish(self) -> None:
        """The connection ends when what is queued has been written."""
        self._finishing = True
        self._wake.set()

    def shut(self) -> None:
        """The connection ends now: whoever reads from it is told so."""
        self.finish()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def write_queued(self) -> None:
        """Writes what is queued until the connection ends. A peer that does not take it in time is cut off."""
        try:
            while not self._finishing or self._queue:
                while self._queue:
                    async with asyncio.timeout(self.patience_s):
                        entry = self._queue.popleft()
                        await (self.write(entry) if isinstance(entry, bytes) else entry())
                if not self._finishing:
                    self._wake.clear()
                    self._is_idle = True
                    await self._wake.wait()
                    self._is_idle = False
        except (OSError, TimeoutError, ProtocolError):
            self._queue.clear()
        self.shut()

    async def write(self, data: bytes | memoryview) -> None:
        """Writes all of it, past the queue."""
        await self.loop.sock_sendall(self.socket, data)

    async def write_views(self, views: Sequence[memoryview]) -> None:
        """Writes all of them, one after the other, from where they are."""
        walk = Walk(views)
        while batch := walk.batch():
            try:
                walk.advance(self.socket.sendmsg(batch))
            except (BlockingIOError, InterruptedError):
                await self._ready(self.loop.add_writer, self.loop.remove_writer)

    # --- in ---------------------------------------------------------------------------------------------------------

    async def receive(self, max_bytes: int) -> bytes:
        """The next frame's record.

        Raises EOFError at the end, StrangerError for a frame that is too long, OSError for one that came damaged.
        """
        head = bytearray(wire.LENGTH_BYTES)
        await self.receive_into(memoryview(head))
        length = int.from_bytes(head, "little")
        if not 0 < length <= max_bytes:
            raise wire.StrangerError(f"its frame is longer than {max_bytes:,} bytes")
        sealed = bytearray(wire.DIGEST_BYTES + length)
        await self.receive_into(memoryview(sealed))
        return wire.opened(bytes(sealed))

    async def receive_into(self, view: memoryview) -> None:
        """Fills the view. Raises EOFError at the end."""
        while view:
            count = await self.loop.sock_recv_into(self.socket, view)
            if count == 0:
                raise EOFError
            view = view[count:]

    async def receive_views(self, views: Sequence[memoryview], full: Callable[[int], None]) -> None:
        """Fills them one after the other; tells `full` how many are, while they are still in the processor's cache.

        Raises EOFError at the end. Nothing is written once the caller's task has been cancelled.
        """
        walk = Walk(views)
        while batch := walk.batch():
            try:
                count = self.socket.recvmsg_into(batch)[0]
            except (BlockingIOError, InterruptedError):
                self._wake_at(min(walk.num_left, _WAKE_BYTES))
                await self._ready(self.loop.add_reader, self.loop.remove_reader)
                continue
            if count == 0:
                raise EOFError
            walk.advance(count)
            full(walk.num_done)
        self._wake_at(1)

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    async def _ready(self, watch: Callable[..., object], forget: Callable[[int], object]) -> None:
        """Until the socket can be read from, or written to."""
        ready: asyncio.Future[None] = self.loop.create_future()
        file = self.socket.fileno()
        watch(file, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            forget(file)


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its address. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _prepare(listener)
    try:
        listener.bind(place)
    except OSError:
        listener.close()
        raise
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(loop: asyncio.AbstractEventLoop, address: str, patience_s: float) -> Connection:
    """A connection to host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    places = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = places[0]
    made = socket.socket(family, kind, protocol)
    try:
        _prepare(made)
        await loop.sock_connect(made, place)
    except BaseException:
        made.close()
        raise
    return Connection(loop, made, address, patience_s)


def _prepare(made: socket.socket) -> None:
    made.setblocking(False)  # buffer sizes are left to the kernel, which goes higher than it would let us ask for
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
