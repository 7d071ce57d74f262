"""How a rank ends where Python is not asked: a crash, a library that calls C's `exit`, a call that keeps the lock.

Kernel libraries do each of these when a device has failed under them: FA3 and FlashMLA end the process where CUDA
returns an error, and destructors then wait for the device, maybe with the interpreter's lock in their hands. Whatever
happens, the log says where, and the process is gone soon: the head notices nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ELF_HEADERS = "0x10"

# C keeps them for as long as the process lives, so Python has to as well.
_kept: list[object] = []


def crash_clearly() -> None:
    """A fatal signal writes down every thread's Python stack, and the process is not kept by the writing of a core.

    Pools in page-locked memory would take minutes, in which nobody can see that the rank is dead.
    """
    faulthandler.enable()
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/coredump_filter").write_text(_ELF_HEADERS, "ascii")


def before_exit(told: Callable[[], None]) -> None:
    """Calls `told`, which is to end the process, when a library calls C's `exit`, before destructors run.

    Register it when all libraries are loaded: the last one that registers is called first. An end of the interpreter
    itself goes past it and past all destructors.
    """
    on_exit = getattr(ctypes.CDLL(None), "on_exit", None)
    if on_exit is None:  # only glibc has it
        return
    # Python is gone when C is told of an ordinary end.
    atexit.register(lambda: os._exit(1))
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda status, argument: told())
    _kept.append(callback)
    on_exit(callback, None)


def end_within(seconds: float) -> None:
    """Writes down every thread's stack and ends the process (1) unless this, or `go_on`, is called again before.

    By a thread of C's: also where no Python can run.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)


def go_on() -> None:
    """Nothing has to be done within a time any more."""
    faulthandler.cancel_dump_traceback_later()
