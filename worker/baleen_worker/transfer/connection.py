"""One socket of a transfer: frames in, a queue of what goes out, and the staging memory that pages pass through."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.messages import FromDecode, FromPrefill
from baleen_worker.transfer.receiving import WINDOW

_NUM_BUFFERS = 8
_BACKLOG = 128

# Makes an answer when it is its turn: copies pages into the buffer, returns the frame and the bytes that follow it.
CopyOut = Callable[[memoryview], tuple[FromPrefill, memoryview | None]]


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


@dataclass(eq=False, slots=True)
class Connection:
    """`patience_s`: how long a peer may take for one thing that is written. Whoever opened it closes it."""

    loop: asyncio.AbstractEventLoop
    socket: socket.socket
    name: str
    patience_s: float
    since_s: float = field(default_factory=time.monotonic)
    _queue: deque[bytes | CopyOut] = field(default_factory=deque[bytes | CopyOut])
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _finishing: bool = False

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, message: FromDecode | FromPrefill) -> None:
        """Queues a frame."""
        self._queue.append(wire.encode(message))
        self._wake.set()

    def send_pages(self, copy_out: CopyOut) -> None:
        """Queues the answer to a read. Raises ProtocolError when too many wait already."""
        if sum(not isinstance(entry, bytes) for entry in self._queue) > WINDOW:
            raise ProtocolError("it asks for more pages than it takes")
        self._queue.append(copy_out)
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

    async def write_queued(self, buffers: Buffers) -> None:
        """Writes what is queued until the connection ends. A peer that does not take it in time is cut off."""
        try:
            while not self._finishing or self._queue:
                while self._queue:
                    async with asyncio.timeout(self.patience_s):
                        await self._write_entry(self._queue.popleft(), buffers)
                if not self._finishing:
                    self._wake.clear()
                    await self._wake.wait()
        except (OSError, TimeoutError, ProtocolError):
            self._queue.clear()
        self.shut()

    async def _write_entry(self, entry: bytes | CopyOut, buffers: Buffers) -> None:
        if isinstance(entry, bytes):
            await self.write(entry)
            return
        async with buffers.take() as buffer:
            message, pages = entry(buffer)
            await self.write(wire.encode(message))
            if pages is not None:
                await self.write(pages)

    async def write(self, data: bytes | memoryview) -> None:
        """Writes all of it, past the queue."""
        await self.loop.sock_sendall(self.socket, data)

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
