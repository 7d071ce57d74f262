"""What the head says about itself while it starts and runs: JSON lines for a supervisor, one line for a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import msgspec


def report(event: str, **fields: Any) -> None:
    """One JSON line for the supervisor; a supervisor that is gone is noticed by its pipe, not here."""
    line = msgspec.json.encode({"event": event, **fields}).decode()
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


class LoadingLine:
    """Shows the loading of weights: events for a supervisor, one line rewritten in place on a terminal."""

    def __init__(self, *, supervised: bool) -> None:
        self._supervised = supervised
        self._on_terminal = not supervised and sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._shown = False

    def show(self, done_bytes: int, total_bytes: int) -> None:
        if self._supervised:
            report("loading", done_bytes=done_bytes, total_bytes=total_bytes)
        elif self._on_terminal:
            rate = done_bytes / max(time.monotonic() - self._began_s, 1e-3)
            share = done_bytes / max(total_bytes, 1)
            text = (
                f"\rloading {done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB ({share:.0%}, {rate / 1e9:.2f} GB/s)"
            )
            print(text, end="", file=sys.stderr, flush=True)
            self._shown = True

    def finish(self) -> None:
        if self._shown:
            print(file=sys.stderr)
            self._shown = False
