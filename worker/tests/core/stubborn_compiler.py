"""A compiler that does what its sources say, in place of `baleen_worker.grammar.backend`; run, it serves trials.

Sources: `spin FILE` computes for ever and keeps its processor seconds in the file, as a double; `sleep S` waits for S
seconds and compiles; `take N` needs N bytes and compiles; `crash` takes its process down; `refuse` is refused.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from baleen_worker.request import Constraint

SECONDS = struct.Struct("d")


class GrammarError(ValueError):
    """A source that is refused."""


class Backend:
    """See the module."""

    def __init__(self, *_: Any) -> None:
        """Needs nothing of a model."""

    def compile(self, constraint: Constraint) -> SimpleNamespace:
        """Does what the source says."""
        match constraint.source.split():
            case ["spin", path]:
                _spin(Path(path))
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["take", count]:
                mmap.mmap(-1, int(count)).close()  # never touched: it takes no time, which has a limit of its own
            case ["crash"]:
                os.abort()
            case _:
                raise GrammarError("it is refused")
        return SimpleNamespace(memory_size_bytes=1)

    def match(self, *_: Any) -> SimpleNamespace:
        """A matcher that allows something."""
        return SimpleNamespace(allowed=lambda: SimpleNamespace(any=lambda: True))


def _spin(path: Path) -> NoReturn:
    with path.open("wb", buffering=0) as file:
        while True:
            os.pwrite(file.fileno(), SECONDS.pack(time.process_time()), 0)


if __name__ == "__main__":
    sys.modules["baleen_worker.grammar.backend"] = sys.modules["__main__"]
    from baleen_worker.grammar import trial

    trial.main(sys.argv[1:])
