"""The rank process with traps at the phases of a request, started by `worker.py` in place of `baleen_worker.rank`.

What a phase means in the product's terms stands in `PHASES`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from baleen_worker import rank
from baleen_worker.fake_pages import FakePageStore
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.handover import Handover
from baleen_worker.legs import Legs
from chaos.trap import Trap, own_trap

# Phase: where it is, and whether it is reached before the call or after it.
PHASES: dict[str, tuple[type, str, bool]] = {
    "step": (FakeRunner, "launch", True),  # any step
    "announced": (Legs, "offer", False),  # the prefill worker has computed a chunk
    "serving": (FakePageStore, "read", False),  # it has copied out pages that the peer reads
    "finishing": (Legs, "finish", True),  # it has the token, and has not told
    "reserved": (Legs, "reserve", False),  # the decode worker has room for the pages
    "storing": (FakePageStore, "write", False),  # it has stored some of them
    "arrived": (Handover, "_arrive", True),  # it has all, and has told nobody
    "first-token": (Handover, "_arrive", False),  # it has told the token, and decodes next
}


def set_traps(trap: Trap) -> None:
    """Puts every phase's trap in its place."""
    for phase, (owner, name, is_before) in PHASES.items():
        setattr(owner, name, _trapped(getattr(owner, name), trap, phase, is_before=is_before))


def _trapped(method: Callable[..., Any], trap: Trap, phase: str, *, is_before: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        if is_before:
            trap.reach(phase)
        result = method(*arguments, **named)
        if not is_before:
            trap.reach(phase)
        return result

    return call


if __name__ == "__main__":
    set_traps(own_trap())
    sys.exit(rank.main())
