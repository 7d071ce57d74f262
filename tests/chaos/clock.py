"""The wall clocks of a stack's processes, which a schedule can set: see `clock.c`."""

from __future__ import annotations

import atexit
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The clock of the processes that are started with `environment`. It is right until it is set."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baleen-clock-")
        self._file = Path(self._folder.name) / "offset"
        self.set(0.0)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(_library()), "BALEEN_CHAOS_CLOCK": str(self._file)}

    def set(self, ahead_s: float) -> None:
        """Puts it so far ahead of the machine's, or behind; at once, in processes that run as well."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", round(ahead_s * 1e9)))

    def close(self) -> None:
        """Removes its file; no process should be left that reads it."""
        self._folder.cleanup()


@cache
def _library() -> Path:
    """Compiled once a process, with the compiler that everything else here takes. It goes when this process does."""
    folder = tempfile.mkdtemp(prefix="baleen-clock-library-")
    atexit.register(shutil.rmtree, folder)
    library = Path(folder) / "clock.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library
