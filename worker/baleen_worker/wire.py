"""Carries messages between head and rank: msgspec frames over one ZMQ pair on a Unix socket. No pickle.

The socket lies in a folder of its own that only its owner may enter, and that is removed once both ends are connected.
A rank that runs ahead of the head waits for it after MAX_FRAMES_AHEAD frames; nothing is ever dropped.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from baleen_worker.messages import Command, Event
from baleen_worker.packed import pack, unpack

MAX_FRAMES_AHEAD = 256
# The kernel allows 107 bytes in the path of a Unix socket.
_MAX_SOCKET_PATH = 107
_SOCKET_NAME = "rank0"
_LAST_WORDS_MS = 1000


class HeadEnd:
    """The head's end. Binds before the rank starts."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event, dec_hook=unpack)
        self._folder = Path(tempfile.mkdtemp(prefix="baleen-"))  # mode 0700
        if len(str(self._folder / _SOCKET_NAME)) > _MAX_SOCKET_PATH:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix="baleen-", dir="/tmp"))
        self.path = self._folder / _SOCKET_NAME
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.RCVHWM, MAX_FRAMES_AHEAD)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{self.path}")

    async def send(self, command: Command) -> None:
        """Sends one command; returns at once, since the queue towards the rank has no bound.

        A rank that is gone misses nothing: its death is noticed by its process and ends the head.
        """
        with contextlib.suppress(zmq.Again):
            await self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        """The next event."""
        return self._decoder.decode(await self._socket.recv())

    def forget_path(self) -> None:
        """Removes the folder; the connection stays. Call when the rank has spoken."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Gives the socket and the folder back."""
        self.forget_path()
        self._socket.close()
        self._context.term()


class RankEnd:
    """The rank's end; the inbox and outbox of its engine."""

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=pack)
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, MAX_FRAMES_AHEAD)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, _LAST_WORDS_MS)
        self._socket.connect(f"ipc://{path}")

    def drain(self, *, wait: bool) -> list[Command]:
        """All commands that have arrived; with `wait`, at least one."""
        commands: list[Command] = []
        if wait:
            self._socket.poll()
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            commands.append(self._decoder.decode(frame))

    def fileno(self) -> int:
        """Becomes readable when commands come. `drain` must have emptied the inbox before, or this stays silent."""
        return int(self._socket.get(zmq.FD))

    def publish(self, event: Event) -> None:
        """Sends one event, waiting for the head when it is far behind."""
        self._socket.send(self._encoder.encode(event))

    def close(self) -> None:
        """Delivers what was published, or gives up after a second."""
        self._socket.close()
        self._context.term()
