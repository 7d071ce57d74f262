"""On the path of a worker, this strikes its runner: Python imports it before anything else.

BALEEN_TEST_FAULT names the fault, BALEEN_TEST_FAULT_MARK a file that does not exist yet. The first rank that is given a
prompt which begins with FAULT_TOKEN makes the file and is struck; others, and later lives, go on. Without the
variables nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

FAULT_TOKEN = 666
_LIBRARIES = {
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: ctypes.CDLL(None).exit(1),
    "stuck": lambda: ctypes.PyDLL(None).sleep(3600),
}


class Struck:
    """A runner that a fault befalls. `fault`:

    "hang": a step is never collected. "raise": every launch raises. "crash": a library reads where nothing is. "exit":
    one calls C's `exit`. "stuck": one sleeps with the interpreter's lock in its hands. "illegal access", "endless
    kernel": what the device is given to do, beside the step, writes where nothing is, or does not end.
    """

    def __init__(self, inner: Any, fault: str, mark: Path) -> None:
        self._inner, self._fault, self._mark = inner, fault, mark
        self._raises = False

    def launch(self, plan: Any) -> Any:
        """See `Runner`."""
        if self._raises:
            raise RuntimeError("the device is lost")
        if any(row.start == 0 and list(row.token_ids[:1]) == [FAULT_TOKEN] for row in plan.rows) and self._is_first():
            return self._strike(plan)
        return self._inner.launch(plan)

    def collect(self) -> Any:
        """Of a step that hangs."""
        threading.Event().wait()

    def _is_first(self) -> bool:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, plan: Any) -> Any:
        if self._fault == "hang":
            return self
        if self._fault == "raise":
            self._raises = True
            raise RuntimeError("the device is lost")
        if self._fault in _LIBRARIES:
            _LIBRARIES[self._fault]()
        import torch

        if self._fault == "endless kernel":
            torch.cuda._sleep(1 << 62)
        else:
            assert self._fault == "illegal access", self._fault
            from bad_kernel import write

            write[(1,)](64)  # in the first page; high addresses may be ones that the driver has mapped
        return self._inner.launch(plan)


def _arm(fault: str, mark: Path) -> None:
    from baleen_worker import watchdog

    class WatchedRunner(watchdog.WatchedRunner):
        """The product's, around a runner that is struck."""

        def __init__(self, inner: Any, **options: Any) -> None:
            super().__init__(Struck(inner, fault, mark), **options)

    watchdog.WatchedRunner = WatchedRunner


if "BALEEN_TEST_FAULT" in os.environ:
    _arm(os.environ["BALEEN_TEST_FAULT"], Path(os.environ["BALEEN_TEST_FAULT_MARK"]))
