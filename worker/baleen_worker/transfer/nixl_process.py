"""A process that holds one agent of NIXL and one stretch of staging memory, and does what the rank beside it says.

Started by `couriers.py` alone, as `-m`. What UCX writes, it writes into this process's memory; when it aborts, it
aborts this process; and when the process is killed, nothing of it writes any more. Imports no PyTorch.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np

MAX_RECORD_BYTES = 1 << 16
PACKAGES = ("nixl_cu13", "nixl_cu12")  # one for each version of CUDA
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0002


class Reach(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    """Become acquainted with the agent that says this of itself."""

    where: bytes


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Read so many bytes at the peer's address into staging memory."""

    address: int
    offset: int
    num_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The agent is there: what a peer needs to reach it, and where its staging memory begins."""

    where: bytes
    address: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """What was asked has been done, to the last byte."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It has not, and the process is of no more use."""

    reason: str


Answer = Ready | Done | Failed
_orders: msgspec.msgpack.Decoder[Reach | Fetch] = msgspec.msgpack.Decoder(Reach | Fetch)


class Agent(Protocol):
    """A library's end: staging memory, registered, and reads into it. Raises whatever it likes."""

    def start(self) -> Ready:
        """How it is reached."""
        ...

    def reach(self, where: bytes) -> None:
        """What `start` told a peer."""
        ...

    def fetch(self, order: Fetch) -> None:
        """Until the last byte is here."""
        ...


class Nixl:
    """Over UCX, which chooses the way. `address`: of the staging memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        api = _api()
        self._agent = api.nixl_agent(secrets.token_hex(16), api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        self._address = address
        self._peer = b""

    def start(self) -> Ready:
        """See `Agent`."""
        return Ready(self._agent.get_agent_metadata(), self._address)

    def reach(self, where: bytes) -> None:
        """See `Agent`."""
        self._peer = self._agent.add_remote_agent(where)

    def fetch(self, order: Fetch) -> None:
        """See `Agent`."""
        ours, theirs = (
            self._agent.get_xfer_descs([(address, order.num_bytes, 0)], "DRAM")
            for address in (self._address + order.offset, order.address)
        )
        handle = self._agent.initialize_xfer("READ", ours, theirs, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"a read ends with {state}")
        self._agent.release_xfer_handle(handle)


def _api() -> Any:
    """The package's interface. Raises ImportError."""
    for name in PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError("no NIXL is installed")


def run(arguments: Sequence[str], open_agent: Callable[[int, int], Agent]) -> NoReturn:
    """Until the rank is gone or something fails.

    `arguments`: the rank's socket and the staging memory's file, by number, and the rank's process.
    """
    rank = socket.socket(fileno=int(arguments[0]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(arguments[2]):
            os._exit(0)
    memory = mmap.mmap(int(arguments[1]), 0)
    try:
        agent = open_agent(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
        rank.send(msgspec.msgpack.encode(agent.start()))
        while record := rank.recv(MAX_RECORD_BYTES):
            order = _orders.decode(record)
            if isinstance(order, Reach):
                agent.reach(order.where)
            else:
                agent.fetch(order)
            rank.send(msgspec.msgpack.encode(Done()))
    except Exception as error:  # noqa: BLE001 - a library's errors have no class in common, and each is told
        rank.send(msgspec.msgpack.encode(Failed(f"{type(error).__name__}: {error}")))
    # A library takes leave of its peers, which may hang: whoever was to be told has been told.
    os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1:], Nixl)
