"""Couriers: processes that bring staged pages from one host to another by a library that is trusted with nothing else.

A courier shares one stretch of staging memory with its rank, and no page. It serves one loan: whatever becomes of it,
of the library in it or of its peer, is that loan's end and no more. Killing it ends all that it could write, and its
staging memory is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.transfer.lending import Backend, LoanError
from baleen_worker.transfer.nixl_process import MAX_RECORD_BYTES, PACKAGES, Answer, Failed, Fetch, Reach, Ready

if TYPE_CHECKING:
    from typing import Any

# Python, the library and the registration of memory; seconds on a machine that has other work.
_START_S = 30.0
NIXL = ("-m", "baleen_worker.transfer.nixl_process")
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Courier:
    """One process and its staging memory. `ready` says how a peer's courier reaches it."""

    def __init__(self, program: Sequence[str], devices: str, num_bytes: int) -> None:
        """Starts it; it is of use once `ready` has been awaited. Raises OSError."""
        file = os.memfd_create("baleen-staging", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._asks = asyncio.Lock()
        self._devices = devices
        # Nobody writes to it: it ends when the process does.
        self._lifeline, its_lifeline = os.pipe()
        try:
            os.ftruncate(file, num_bytes)
            self.memory = memoryview(mmap.mmap(file, num_bytes))
            self._process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno()), str(file), str(os.getpid())],
                pass_fds=(theirs.fileno(), file, its_lifeline),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=_SILENT | os.environ | {"UCX_NET_DEVICES": devices},
            )
        except BaseException:
            self._socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(file)
            os.close(its_lifeline)

    async def ready(self) -> Ready:
        """How it is reached. Raises LoanError when the library does not start."""
        failure = f"NIXL does not start on {self._devices}"
        try:
            async with asyncio.timeout(_START_S):
                answer = await self._hear()
        except (OSError, EOFError, TimeoutError) as error:
            raise LoanError(f"{failure}: {str(error) or 'its process has ended'}") from None
        if isinstance(answer, Failed):
            raise LoanError(f"{failure}: {answer.reason}")
        assert isinstance(answer, Ready), "a courier begins with something else"
        return answer

    async def reach(self, where: bytes) -> None:
        """Has it become acquainted with a peer's. Raises like `fetch`."""
        await self._ask(Reach(where))

    async def fetch(self, address: int, offset: int, num_bytes: int) -> None:
        """Has it read from the peer's memory into its own. Raises OSError or EOFError, after which it is of no use."""
        await self._ask(Fetch(address, offset, num_bytes))

    @contextlib.contextmanager
    def watched(self, call: Callable[[], None]) -> Generator[None]:
        """Within, this is called as soon as its process is gone."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._lifeline)
            call()

        loop.add_reader(self._lifeline, gone)
        try:
            yield
        finally:
            loop.remove_reader(self._lifeline)

    async def end(self) -> None:
        """Kills it, so that nothing of it writes any more; whoever still asks is told that it is gone."""
        self._process.kill()
        self._process.wait()
        async with self._asks:
            self._socket.close()
        os.close(self._lifeline)

    async def _ask(self, order: Reach | Fetch) -> None:
        async with self._asks:
            await asyncio.get_running_loop().sock_sendall(self._socket, msgspec.msgpack.encode(order))
            answer = await self._hear()
        if isinstance(answer, Failed):
            raise ConnectionResetError(answer.reason)

    async def _hear(self) -> Any:
        record = await asyncio.get_running_loop().sock_recv(self._socket, MAX_RECORD_BYTES)
        if not record:
            raise EOFError
        return _answers.decode(record)


class Couriers:
    """How a rank starts couriers. `devices`: networks that they may use, as UCX names them."""

    kind = Backend.NIXL
    start_s = _START_S

    def __init__(self, devices: str, program: Sequence[str] = NIXL) -> None:
        """Raises LoanError when the library is not installed."""
        if program is NIXL and not any(map(importlib.util.find_spec, PACKAGES)):
            raise LoanError("the Python package nixl is missing: pip install nixl-cu13==1.5.1")
        self._devices = ",".join(map(_ucx_name, devices.split(",")))
        self._program = program

    @contextlib.asynccontextmanager
    async def employ(self, num_bytes: int) -> AsyncGenerator[Courier]:
        """One with so much staging memory, which starts while its user goes on. Raises LoanError."""
        try:
            courier = Courier(self._program, self._devices, num_bytes)
        except OSError as error:
            raise LoanError(f"no process can be started: {error}") from None
        try:
            yield courier
        finally:
            await courier.end()

    def try_out(self) -> None:
        """Whether the library starts with these devices. Takes a second. Raises LoanError."""

        async def start() -> None:
            async with self.employ(mmap.PAGESIZE) as courier:
                await courier.ready()

        asyncio.run(start())


def _ucx_name(device: str) -> str:
    """Cards have ports, and the first is meant unless one is named."""
    return f"{device}:1" if Path("/sys/class/infiniband", device).exists() else device


# Unless its user wants to know more. A process that aborts is noticed, and needs no report of its own.
_SILENT = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none"}
