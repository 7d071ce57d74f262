"""Time that the scheduler and the frames cost a step in the rank process, over batch size and context length.

The real engine loop turns with the fake runner; its inbox and outbox are in this process, and the outbox encodes each
frame as the wire does. A turn's time less the time inside the runner is what the engine itself costs. Every request is
decoding when the clock starts, so a step has as many rows as requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))

from baleen_worker.cache.pages import PagePool
from baleen_worker.engine import Engine
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Command, Event, Submit
from baleen_worker.request import Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import StepHandle, StepOutput, StepPlan
from report import Bar, Plot, write

LIMIT_MS = 1.0
BAR_BATCH = 256
BATCHES = (32, 64, 128, 256, 512)
CONTEXTS = (1024, 4096, 16384, 65536)
SWEEP_CONTEXT = 1024
SWEEP_BATCH = 64
VOCAB_SIZE = 129280
PAGE_SIZE = 64
# Steps of which the fastest tenth and the slowest hundredth are reported beside the median.
WARM_UP_STEPS = 50


class ClockedRunner:
    """The fake runner with the time spent inside it."""

    def __init__(self, inner: FakeRunner) -> None:
        self._inner = inner
        self.spent_s = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        began_s = time.perf_counter()
        handle = self._inner.launch(plan)
        self.spent_s += time.perf_counter() - began_s
        return ClockedHandle(self, handle)


class ClockedHandle:
    """A step in flight of the fake runner."""

    def __init__(self, runner: ClockedRunner, inner: StepHandle) -> None:
        self._runner = runner
        self._inner = inner

    def collect(self) -> StepOutput:
        began_s = time.perf_counter()
        output = self._inner.collect()
        self._runner.spent_s += time.perf_counter() - began_s
        return output


class Lines:
    """Inbox and outbox of the engine: commands wait in a list, events are encoded and counted."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()

    def drain(self, *, wait: bool) -> Sequence[Command]:
        commands, self.commands = self.commands, []
        return commands

    def publish(self, event: Event) -> None:
        self.num_bytes += len(self._encoder.encode(event))


def measure(batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step with `batch` requests that decode behind prompts of `context` tokens."""
    max_tokens = WARM_UP_STEPS + steps + 2
    num_pages = batch * (-(-(context + max_tokens) // PAGE_SIZE)) + 1
    runner = ClockedRunner(FakeRunner(num_pages, VOCAB_SIZE))
    # All prompts fit the first step, so all requests run from there to the end.
    limits = SchedulerLimits(batch, max_step_tokens=batch * context, max_queued_requests=batch)
    scheduler = Scheduler(limits, PagePool(num_pages))
    lines = Lines()
    engine = Engine(scheduler, runner, lines, lines)
    prompt = list(range(context))
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    lines.commands.append(Submit([Request((1, key), prompt, sampling) for key in range(batch)]))
    for _ in range(WARM_UP_STEPS):
        engine.turn()
    times_ms: list[float] = []
    num_bytes = lines.num_bytes
    for _ in range(steps):
        runner.spent_s = 0.0
        began_s = time.perf_counter()
        engine.turn()
        times_ms.append((time.perf_counter() - began_s - runner.spent_s) * 1000)
    running = scheduler.load.running_requests
    if running != batch:
        raise RuntimeError(f"{running} of {batch} requests still ran when the clock stopped")
    cuts = statistics.quantiles(times_ms, n=100)
    return {
        "batch": batch,
        "context": context,
        "steps": steps,
        "median_ms": round(statistics.median(times_ms), 4),
        "p10_ms": round(cuts[9], 4),
        "p99_ms": round(cuts[98], 4),
        "frame_bytes": (lines.num_bytes - num_bytes) // steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps measured at each point (default %(default)s)")
    steps: int = parser.parse_args().steps

    by_batch = [measure(batch, SWEEP_CONTEXT, steps) for batch in BATCHES]
    by_context = [measure(SWEEP_BATCH, context, steps) for context in CONTEXTS]
    at_bar = next(point for point in by_batch if point["batch"] == BAR_BATCH)
    per_row_us = [1000 * point["median_ms"] / point["batch"] for point in by_batch]
    shortest, longest = by_context[0], by_context[-1]
    write(
        "engine_overhead",
        {
            "by_batch": by_batch,
            "by_context": by_context,
            "us_per_row_by_batch": [round(value, 3) for value in per_row_us],
            "longest_over_shortest_context": round(longest["median_ms"] / shortest["median_ms"], 3),
        },
        [
            Bar(f"scheduler and frame, {BAR_BATCH} running requests", at_bar["median_ms"], LIMIT_MS, "ms/step"),
            Bar("cost a row, 512 requests over 64", per_row_us[-1] / per_row_us[1], 1.25, "ratio"),
            Bar("cost a step, 64K context over 1K", longest["median_ms"] / shortest["median_ms"], 1.25, "ratio"),
        ],
        Plot(
            title="Engine overhead a step",
            x_label="running requests",
            y_label="ms",
            series={
                "median": [(point["batch"], point["median_ms"]) for point in by_batch],
                "p99": [(point["batch"], point["p99_ms"]) for point in by_batch],
            },
            limit=LIMIT_MS,
        ),
    )


if __name__ == "__main__":
    main()
