"""Compiles constraints where they can do no harm: in a process of their own, with a limit on time and memory.

A few lines of schema can keep a compiler busy for minutes, and nothing can stop a thread that is inside it. So every
constraint is compiled twice: first in a child of this server, which dies at the limit, and only when that succeeded in
the rank, where it then takes as long again. The limit is one of processor time, so that a sound constraint is not
refused because the machine is busy. (The result itself is not sent: writing it down takes longer than making
it anew.) Started by `TrialServer` alone, as `-m baleen_worker.grammar.trial`.

The server's standard input is a socket on which it is given one end of a connection for each trial. When it reads the
end there, the rank is gone. None of them has a name in the file system, so nothing is left behind by a rank that is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.request import Constraint

if TYPE_CHECKING:
    from baleen_worker.grammar.backend import Backend

_PROGRAM = ("-m", "baleen_worker.grammar.trial")
_PR_SET_PDEATHSIG = 1
_EXTRA_MEMORY_BYTES = 1 << 30
_READY_S = 120.0
# Of a child that waits for a processor, or for nothing at all: it ends after so many times its limit.
_MOST_WAITING = 30

logger = logging.getLogger(__name__)


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """What to compile, and within how much processor time."""

    constraint: Constraint
    limit_s: float


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """How it went; `error` is None when it compiled."""

    error: str | None = None


class TrialLostError(RuntimeError):
    """The server of trials has died during this one."""


class TrialServer:
    """The rank's end: starts the server with the first trial and ends it with `close`. Used by several threads.

    A server that has died, whatever killed it, is replaced at the next trial.
    """

    def __init__(self, model_dir: Path, vocab_size: int, num_threads: int) -> None:
        """Returns at once; the first trial waits until the server is ready."""
        self._arguments = (str(model_dir), str(vocab_size), str(num_threads))
        self._lock = threading.Lock()
        self._process, self._control = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(_READY_S)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *_PROGRAM, str(os.getpid()), *self._arguments],
                stdin=theirs.fileno(),
                stdout=sys.stderr.fileno(),
            )
        return process, ours

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        """-> a connection to a child of the server, which is started anew if it has ended; the server's control."""
        with self._lock:
            if _has_ended(self._control):
                code = self._process.wait()
                logger.warning("the server of trials has ended with %d; another is started", code)
                self._control.close()
                self._process, self._control = self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise TrialLostError("the server of trials has died, or takes no more of them") from error
            return ours, self._control

    def judge(self, constraint: Constraint, limit_s: float) -> Verdict | None:
        """Whether a constraint compiles within the limit; None when it does not, or takes the compiler down.

        Raises TrialLostError when not the compiler's own process, but the server has died meanwhile.
        """
        connection, control = self._connect()
        answer = b""
        with connection, contextlib.suppress(TimeoutError, ConnectionError):
            # A child always ends: this is for a server that starts or hangs.
            connection.settimeout(_READY_S + _MOST_WAITING * limit_s)
            connection.sendall(msgspec.msgpack.encode(Trial(constraint, limit_s)))
            connection.shutdown(socket.SHUT_WR)
            answer = _read_all(connection)
        if answer:
            return msgspec.msgpack.decode(answer, type=Verdict)
        if _has_ended(control):
            raise TrialLostError("the server of trials died during a trial")
        return None

    def close(self) -> None:
        """Ends the server and whatever it still compiles."""
        with self._lock:
            self._process.kill()
            self._process.wait()
            self._control.close()


def _has_ended(control: socket.socket) -> bool:
    """Whether the server is gone: its end of the socket is closed then, and while it lives it writes nothing."""
    if control.fileno() < 0:  # somebody else has found it so already
        return True
    watch = select.poll()
    watch.register(control, select.POLLIN)
    return bool(watch.poll(0))


def main(arguments: list[str]) -> None:
    """Forks a child for each connection, until the rank is gone."""
    control = socket.socket(fileno=sys.stdin.fileno())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(arguments[0]):
            return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    from baleen_worker.grammar.backend import Backend  # seconds

    backend = Backend(Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    while True:
        _, [*ends], _, _ = socket.recv_fds(control, 1, 1)
        if not ends:
            return
        with socket.socket(fileno=ends[0]) as connection:
            if os.fork() == 0:
                control.close()  # else trials given to this server would not end with it
                _serve(connection, backend)


def _serve(connection: socket.socket, backend: Backend) -> None:
    """The child: never returns."""
    status = 1
    with contextlib.suppress(OSError, MemoryError, msgspec.DecodeError):
        trial = msgspec.msgpack.decode(_read_all(connection), type=Trial)
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, trial.limit_s)
        signal.setitimer(signal.ITIMER_REAL, _MOST_WAITING * trial.limit_s)
        os.nice(5)
        memory = _virtual_bytes() + _EXTRA_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        connection.sendall(msgspec.msgpack.encode(_compile(backend, trial.constraint)))
        status = 0
    os._exit(status)


def _compile(backend: Backend, constraint: Constraint) -> Verdict:
    from baleen_worker.grammar.backend import GrammarError

    try:
        grammar = backend.compile(constraint)
    except GrammarError as error:
        return Verdict(str(error))
    if not backend.match(grammar, (0,)).allowed().any():
        return Verdict("it allows no answer: no token may come first")
    return Verdict()


def _read_all(connection: socket.socket) -> bytes:
    """What the peer sends until it shuts its side down."""
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1:])
