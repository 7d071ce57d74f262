"""Processor time that the scheduler and the frames cost a step, over batch size and context length.

The real engine loop turns with the fake runner, with the prefix cache and two steps in flight, as on a GPU; its inbox
and outbox are in this process, and the outbox encodes each frame as the wire does. A turn's time less the time inside
the runner is what the engine itself costs. Every request is decoding when the clock starts, so a step has as many rows
as requests; a sixty-fourth of them fill a page in it. What the head then does with a frame, in a process of its own, is
told beside it, and so is a burst: as many short requests as can run, all arriving at once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))

from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.engine import Engine
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.messages import Command, Event, StepDone, Submit
from baleen_worker.packed import pack, unpack
from baleen_worker.request import Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.server import step_frame
from baleen_worker.step import StepHandle, StepOutput, StepPlan
from report import Bar, Plot, write

LIMITS_MS = {256: 0.5, 2048: 2.0}
BATCHES = (32, 64, 128, 256, 512, 1024, 2048)
BURSTS = (256, 512, 1024, 2048)
CONTEXTS = (1024, 4096, 16384, 65536)
SWEEP_CONTEXT = 1024
SWEEP_BATCH = 64
VOCAB_SIZE = 129280
PAGE_SIZE = 64
WARM_UP_STEPS = 50


class ClockedRunner:
    """The fake runner with the time spent inside it."""

    def __init__(self, inner: FakeRunner) -> None:
        self._inner = inner
        self.spent_s = 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        began_s = time.thread_time()
        handle = self._inner.launch(plan)
        self.spent_s += time.thread_time() - began_s
        return ClockedHandle(self, handle)


class ClockedHandle:
    """A step in flight of the fake runner."""

    def __init__(self, runner: ClockedRunner, inner: StepHandle) -> None:
        self._runner = runner
        self._inner = inner

    def collect(self) -> StepOutput:
        began_s = time.thread_time()
        output = self._inner.collect()
        self._runner.spent_s += time.thread_time() - began_s
        return output


class Lines:
    """Inbox and outbox of the engine: commands wait in a list, events are encoded and counted."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=pack)
        self.last_frame = b""

    def drain(self, *, wait: bool) -> Sequence[Command]:
        commands, self.commands = self.commands, []
        return commands

    def publish(self, event: Event) -> None:
        self.last_frame = self._encoder.encode(event)
        self.num_bytes += len(self.last_frame)


def measure(batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step with `batch` requests that decode behind prompts of `context` tokens."""
    max_tokens = WARM_UP_STEPS + steps + 2
    num_pages = batch * (-(-(context + max_tokens) // PAGE_SIZE)) + 1
    runner = ClockedRunner(FakeRunner(num_pages, VOCAB_SIZE))
    # All prompts fit the first step, so all requests run from there to the end.
    limits = SchedulerLimits(batch, max_step_tokens=batch * context, max_queued_requests=batch)
    pages = PagePool(num_pages)
    scheduler = Scheduler(limits, pages, PrefixCache(pages))
    lines = Lines()
    engine = Engine(scheduler, runner, lines, lines, depth=2)
    settle()
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=(VOCAB_SIZE,))
    # Prompts differ from the first token on and fill their last pages at different steps.
    prompts = [[key, *range(1, context - key % PAGE_SIZE)] for key in range(batch)]
    lines.commands.append(Submit([Request((1, key), prompt, sampling) for key, prompt in enumerate(prompts)]))
    for _ in range(WARM_UP_STEPS):
        engine.turn()
    times_ms: list[float] = []
    num_bytes = lines.num_bytes
    for _ in range(steps):
        runner.spent_s = 0.0
        began_s = time.thread_time()
        engine.turn()
        times_ms.append((time.thread_time() - began_s - runner.spent_s) * 1000)
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
        "head_ms": round(head_ms(lines.last_frame, 100), 4),
    }


def settle() -> None:
    """Collect what earlier measurements left and look at nothing of it again, as a rank does before its first step."""
    gc.collect()
    gc.freeze()


def head_ms(frame: bytes, repeats: int) -> float:
    """Median milliseconds in which the head turns one frame of the rank into a gateway's."""
    decoder = msgspec.msgpack.Decoder(StepDone, dec_hook=unpack)
    times_ms: list[float] = []
    for _ in range(repeats):
        began_s = time.thread_time()
        step = decoder.decode(frame)
        for columns in step.streams:
            step_frame(step.step, columns, step.load).SerializeToString()
        times_ms.append((time.thread_time() - began_s) * 1000)
    return statistics.median(times_ms)


def measure_burst(count: int) -> dict[str, Any]:
    """Milliseconds of all steps, runner left out, until `count` requests that come at once have two tokens each."""
    num_pages = 2 * count + 1
    runner = ClockedRunner(FakeRunner(num_pages, VOCAB_SIZE))
    pages = PagePool(num_pages)
    scheduler = Scheduler(SchedulerLimits(count, 16 * count, count), pages, PrefixCache(pages))
    lines = Lines()
    engine = Engine(scheduler, runner, lines, lines)
    sampling = SamplingParams(max_tokens=2, seed=0)
    lines.commands.append(Submit([Request((1, key), [key] * 16, sampling) for key in range(count)]))
    settle()
    began_s = time.thread_time()
    while engine.turn():
        pass
    spent_ms = (time.thread_time() - began_s - runner.spent_s) * 1000
    return {"requests": count, "ms": round(spent_ms, 3), "us_per_request": round(1000 * spent_ms / count, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps measured at each point (default %(default)s)")
    steps: int = parser.parse_args().steps

    by_batch = [measure(batch, SWEEP_CONTEXT, max(steps * 64 // max(batch, 64), 200)) for batch in BATCHES]
    by_context = [measure(SWEEP_BATCH, context, steps) for context in CONTEXTS]
    bursts = [measure_burst(count) for count in BURSTS]
    median_ms = {point["batch"]: point["median_ms"] for point in by_batch}
    per_row_us = {batch: 1000 * ms / batch for batch, ms in median_ms.items()}
    shortest, longest = by_context[0], by_context[-1]
    write(
        "engine_overhead",
        {
            "by_batch": by_batch,
            "by_context": by_context,
            "bursts": bursts,
            "us_per_row_by_batch": {batch: round(value, 3) for batch, value in per_row_us.items()},
            "longest_over_shortest_context": round(longest["median_ms"] / shortest["median_ms"], 3),
        },
        [
            *(
                Bar(f"scheduler and frame, {batch} running requests", median_ms[batch], limit_ms, "ms/step")
                for batch, limit_ms in LIMITS_MS.items()
            ),
            Bar("cost a row, 2,048 requests over 64", per_row_us[2048] / per_row_us[64], 1.25, "ratio"),
            Bar("cost a step, 64K context over 1K", longest["median_ms"] / shortest["median_ms"], 1.25, "ratio"),
            Bar(
                "cost a request, burst of 2,048 over 256",
                bursts[-1]["us_per_request"] / bursts[0]["us_per_request"],
                1.5,
                "ratio",
            ),
        ],
        Plot(
            title="Engine overhead a step",
            x_label="running requests",
            y_label="ms",
            series={
                "median": [(point["batch"], point["median_ms"]) for point in by_batch],
                "p99": [(point["batch"], point["p99_ms"]) for point in by_batch],
                "head, median": [(point["batch"], point["head_ms"]) for point in by_batch],
            },
            limit=LIMITS_MS[2048],
        ),
    )


if __name__ == "__main__":
    main()
