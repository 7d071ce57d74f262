"""How a schedule reaches into a worker: an order in a folder, carried out when the worker comes to the phase it names.

A schedule writes the order with `Trap.set`; the worker's entry point for tests (`worker.py`, `rank.py`) looks for it at
each phase with `Trap.springs`. The product knows nothing of this.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

# Names the folder to the worker's processes.
FOLDER_VARIABLE = "BALEEN_CHAOS_TRAP"
KILL, STOP, STALL = "kill", "stop", "stall"
# Longer than a gateway waits for a worker that says nothing.
STALL_S = 16.0


class Order(msgspec.Struct, frozen=True):
    """`action` is to be done at the phase when it has been passed `skip` times."""

    phase: str
    action: str
    skip: int = 0


class Trap:
    """One folder's order. Either end may be gone at any time; an order is carried out at most once."""

    def __init__(self, folder: Path) -> None:
        self._order = folder / "order"
        self._done = folder / "done"
        self._passed = 0

    def set(self, order: Order) -> None:
        """Gives an order; one that has not been carried out is replaced."""
        self._done.unlink(missing_ok=True)
        unfinished = self._order.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(order))
        unfinished.replace(self._order)

    def clear(self) -> None:
        """Takes the order back."""
        self._order.unlink(missing_ok=True)

    @property
    def sprang(self) -> bool:
        """Whether the last order has been carried out, or is about to be."""
        return self._done.exists()

    def springs(self, phase: str) -> str | None:
        """The action that is due as this phase is reached."""
        try:
            order = msgspec.json.decode(self._order.read_bytes(), type=Order)
            if order.phase != phase:
                return None
            self._passed += 1
            if self._passed <= order.skip:
                return None
            self._order.replace(self._done)
        except FileNotFoundError:
            return None
        self._passed = 0
        return order.action

    def reach(self, phase: str) -> None:
        """Carries out what is due here: to this process and all others of the worker, or to this thread alone."""
        match self.springs(phase):
            case "kill":
                os.killpg(0, signal.SIGKILL)
            case "stop":
                os.killpg(0, signal.SIGSTOP)
            case "stall":
                time.sleep(STALL_S)
            case _:
                pass


def own_trap() -> Trap:
    """That of the worker which this process belongs to."""
    return Trap(Path(os.environ[FOLDER_VARIABLE]))
