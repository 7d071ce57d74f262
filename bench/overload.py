"""Five times more than two pairs of workers can serve: what is still answered, how soon the rest is told, and memory.

The workers are real ones with the fake runner, whose steps take as long as they are told: their slots, not this
machine, bound what they serve. Latency counts from the instant at which a request was due.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import httpx
from peers import free_port
from report import ROOT, Bar, Plot, write
from rig import Program, Router, build_mock, put_load

OVERLOAD = 5
LOST_GOODPUT_LIMIT = 0.1
REFUSAL_P99_LIMIT_MS = 20.0
GROWTH_LIMIT_MIB = 8.0

# 2 decode workers of 12 requests each, 25 ms a step, 10 tokens an answer.
SLOTS, STEP_MS, TOKENS = 12, 25, 10
WORKER = f"--runner fake --fake-step-ms {STEP_MS} --max-running-requests {SLOTS} --max-total-tokens 65536"
ROLES = {"prefill": ["--disaggregation-bootstrap-port", "0"], "decode": []}
PLACES = 2 * SLOTS
SAMPLE_S = 0.5


@contextmanager
def pairs(gateway: Path) -> Iterator[Router]:
    """The gateway before two prefill and two decode workers, with as many places as they have slots."""
    with ExitStack() as running:
        given: list[str] = []
        for role, flags in ROLES.items():
            for _ in range(2):
                port = free_port()
                model = str(ROOT / "models" / "micro")
                command = [sys.executable, "-m", "baleen_worker", model, *WORKER.split(), "--port", str(port)]
                running.enter_context(Program([*command, "--disaggregation-mode", role, *flags]))
                given += [f"--{role}", f"127.0.0.1:{port}"]
        limits = ["--max-concurrent-requests", str(PLACES), "--queue-size", str(PLACES)]
        port = free_port()
        command = [str(gateway), "--port", str(port), *given, *limits, "--log-level", "error"]
        router = running.enter_context(Router(command, port))
        yield all_ready(router.ready())


def all_ready(router: Router) -> Router:
    """Waits until every worker serves."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = httpx.get(f"http://127.0.0.1:{router.port}/metrics", timeout=10).text
        ready = [line for line in text.splitlines() if line.startswith("baleen_worker_ready") and line.endswith(" 1")]
        if len(ready) == 2 * len(ROLES) or "baleen_worker_ready 4" in text:
            return router
        time.sleep(0.1)
    raise RuntimeError("not every worker is ready")


class Memory(threading.Thread):
    """Looks at what the gateway holds, now and then."""

    def __init__(self, router: Router) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._router, self._over, self._began = router, threading.Event(), time.monotonic()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - self._began, self._router.resident_bytes() / 2**20))

    def stop(self) -> None:
        self._over.set()
        self.join()


def measure(router: Router, seconds: float) -> dict[str, Any]:
    """The peak, then the same workers with OVERLOAD times as many requests due."""
    put_load(router.port, connections=PLACES, tokens=TOKENS, seconds=2)
    peak = put_load(router.port, connections=2 * PLACES, tokens=TOKENS, seconds=seconds / 3)
    rate = OVERLOAD * peak["good_per_s"]
    load: dict[str, Any] = {"connections": 1024, "rate": rate, "tokens": TOKENS}
    # Caches and buffers reach their size first.
    put_load(router.port, seconds=3 * seconds / 4, **load)
    memory = Memory(router)
    memory.start()
    over = put_load(router.port, seconds=seconds, **load)
    memory.stop()
    return {
        "peak": peak,
        "overload": over,
        "goodput_kept": round(over["good_per_s"] / peak["good_per_s"], 4),
        "resident_mib": [(round(at, 2), round(mib, 2)) for at, mib in memory.samples],
    }


def growth_mib(samples: list[tuple[float, float]]) -> float:
    """From the first quarter's most to the last quarter's: what goes on growing, not what is taken once."""
    quarter = max(len(samples) // 4, 1)
    return max(mib for _, mib in samples[-quarter:]) - max(mib for _, mib in samples[:quarter])


def main() -> int:
    """Writes bench/results/<host class>/overload.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the overload (default %(default)s)")
    options = parser.parse_args()
    build_mock()
    with pairs(Path(os.environ.get("BALEEN_GATEWAY", ROOT / ".venv/bin/gateway"))) as router:
        found = measure(router, options.seconds)
    over = found["overload"]
    unsaid = over["refusals"] - over["retry_afters"]
    odd = sum(count for status, count in over["by_status"].items() if status not in ("200", "429", "503"))
    lost = 1 - found["goodput_kept"]
    bars = [
        Bar(f"goodput lost at {OVERLOAD} times the peak, two pairs", lost, LOST_GOODPUT_LIMIT, "share"),
        Bar("p99 until a request is refused", over["refusal_us"]["p99"] / 1e3, REFUSAL_P99_LIMIT_MS, "ms"),
        Bar("refusals without Retry-After, and other failures", unsaid + odd, 0, "requests"),
        Bar("growth of the gateway's memory meanwhile", growth_mib(found["resident_mib"]), GROWTH_LIMIT_MIB, "MiB"),
    ]  # fmt: skip
    plot = Plot(
        title=f"The gateway's memory at {OVERLOAD} times the peak",
        x_label="seconds",
        y_label="MiB",
        series={"resident": found["resident_mib"]},
    )
    write("overload", found, bars, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
