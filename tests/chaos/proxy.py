"""A TCP proxy that misbehaves on command: what a network does to connections, one process away from it.

`tc netem` would need privileges and breaks a whole interface; this breaks one link. Each direction has its own faults,
since a partition is often one-sided. Bytes that a blocked direction holds are delivered when it opens again, as TCP
would; only `cut` and `corrupt` lose or change anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

CHUNK_BYTES = 64 << 10
# With a linger time of nothing, closing sends a reset.
RESET = struct.pack("ii", 1, 0)


@dataclass
class Direction:
    """Faults of one direction; all off."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    slice_bytes: int = 0  # 0: as they come; else each write has at most so many
    corrupt_next: bool = False  # flips one byte of what comes next
    corrupt_least_bytes: int = 0  # of what comes next and is at least so long: bulk, not what is said beside it
    cut_after_bytes: int | None = None  # resets the connection once so many more have passed
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open.set()


class FaultProxy:
    """Forwards connections to `target`, a port of this host, and breaks them when told to. Use as a context manager."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.there, self.back = Direction(), Direction()
        self.refuses = False
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._half_closed: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def block(self, *directions: Direction) -> None:
        """Nothing passes, and nobody is told."""
        for direction in directions or (self.there, self.back):
            direction.open.clear()

    def heal(self) -> None:
        """Every fault is over."""
        self.refuses = False
        for direction in (self.there, self.back):
            direction.open.set()
            direction.delay_s = direction.bytes_per_s = 0.0
            direction.slice_bytes, direction.cut_after_bytes = 0, None
            direction.corrupt_next, direction.corrupt_least_bytes = False, 0

    def cut(self) -> None:
        """Resets every connection."""
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    def half_close(self) -> None:
        """Ends what goes to the target; answers still come."""
        for writer in list(self._writers):
            if writer.get_extra_info("peername", (None, 0))[1] == self.target:
                self._half_closed.add(writer)
                with contextlib.suppress(OSError):
                    writer.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            if self.refuses:
                return
            answers, onward = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(onward)
            pumps = self._pump(reader, onward, self.there), self._pump(answers, writer, self.back)
            await asyncio.gather(*pumps)
        except (OSError, asyncio.CancelledError):
            pass  # a broken connection is what this program is for
        finally:
            for end in (writer, onward):
                if end is not None:
                    self._writers.discard(end)
                    self._half_closed.discard(end)
                    end.transport.abort()
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Direction) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await faults.open.wait()
            if writer in self._half_closed:
                continue
            if faults.delay_s:
                await asyncio.sleep(faults.delay_s)
            if faults.corrupt_next and len(data) >= faults.corrupt_least_bytes:
                faults.corrupt_next = False
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
            await self._write(writer, data, faults)
        if writer not in self._half_closed:
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, faults: Direction) -> None:
        place = 0
        while place < len(data):
            step = faults.slice_bytes or len(data)
            if faults.bytes_per_s:
                step = min(step, max(1, int(faults.bytes_per_s / 10)))
                await asyncio.sleep(step / faults.bytes_per_s)
            if faults.cut_after_bytes is not None:
                step = min(step, max(faults.cut_after_bytes, 1))
            piece = data[place : place + step]
            writer.write(piece)
            await writer.drain()
            place += len(piece)
            if faults.cut_after_bytes is not None:
                faults.cut_after_bytes -= len(piece)
                if faults.cut_after_bytes <= 0:
                    faults.cut_after_bytes = None
                    self.cut()
                    return
