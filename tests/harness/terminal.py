"""A program on a terminal of its own, driven as a person would: keys in, what the screen shows out."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from types import TracebackType
from typing import Self

PATIENCE_S = 60.0
# Colours, cursor movements and modes; a line editor writes many of them.
CONTROL_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """Runs a command on a pseudo-terminal. Leaving the block ends it."""

    def __init__(self, command: list[str], *, env: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "BALEEN_API_KEY")}
        # Ctrl-C reaches a program only from its controlling terminal, which `setsid` gives it.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": "xterm"} | (env or {}),
        )
        os.close(slave)
        self.seen = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Presses keys; `\\r` is the return key, `\\x03` Ctrl-C, `\\x04` Ctrl-D."""
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """Waits until `text` shows after what was expected before, and returns all up to and with it, uncoloured.

        AssertionError with what showed instead, when it does not come.
        """
        return self.expect_raw(text.encode(), plain=True).decode()

    def expect_raw(self, wanted: bytes, *, plain: bool = False) -> bytes:
        """The same for bytes, control sequences included unless `plain`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shown = CONTROL_SEQUENCE.sub(b"", self.seen) if plain else self.seen
            end = shown.find(wanted)
            if end >= 0:
                end += len(wanted)
                # What is left begins after the same number of visible characters.
                self.seen = shown[end:]
                return shown[:end]
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} did not show; {shown!r} did"
            if select.select([self._master], [], [], left)[0]:
                try:
                    self.seen += os.read(self._master, 65536)
                except OSError as error:  # the other end is closed
                    raise AssertionError(f"the program ended before {wanted!r}; it showed {shown!r}") from error

    def ended(self) -> int:
        """The exit code, once the program has ended by itself."""
        return self.process.wait(PATIENCE_S)
