"""Seconds from `gateway serve` to readiness and to the first answered request, and from SIGTERM to the end of the last
process, with the micro model."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness.processes import MICRO_MODEL, Gateway, is_alive, wait_for
from report import Bar, Plot, write

READY_LIMIT_S = 10.0
GONE_LIMIT_S = 2.0
REPEATS = 5


def start_once() -> dict[str, float]:
    """One start, from the call to the first answer, and the end that follows."""
    started = time.monotonic()
    with Gateway("serve", str(MICRO_MODEL)) as gateway:
        gateway.ready()
        ready_s = time.monotonic() - started
        with gateway.client() as client:
            client.completions.create(model="micro", prompt="The sea", max_tokens=1)
        answered_s = time.monotonic() - started
        family = gateway.family()
        signalled = time.monotonic()
        gateway.signal(signal.SIGTERM)
        gateway.wait()
        wait_for("every process is gone", lambda: not any(is_alive(process) for process in family))
        gone_s = time.monotonic() - signalled
    return {"ready_s": round(ready_s, 2), "first_answer_s": round(answered_s, 2), "gone_s": round(gone_s, 2)}


def main() -> None:
    """Starts several times; the first start finds cold file caches, or not, as the machine happens to be."""
    starts = [start_once() for _ in range(REPEATS)]
    slowest = {moment: max(start[moment] for start in starts) for moment in ("ready_s", "gone_s")}
    series = {
        "ready": [(number, start["ready_s"]) for number, start in enumerate(starts, 1)],
        "first answer": [(number, start["first_answer_s"]) for number, start in enumerate(starts, 1)],
    }
    plot = Plot("Start of the micro model", "start number", "seconds", series, limit=READY_LIMIT_S)
    bars = [
        Bar("Start to ready, slowest", slowest["ready_s"], READY_LIMIT_S, "s"),
        Bar("Idle, from SIGTERM to the end of its last process, slowest", slowest["gone_s"], GONE_LIMIT_S, "s"),
    ]
    write("startup", {"starts": starts}, bars, plot)


if __name__ == "__main__":
    main()
