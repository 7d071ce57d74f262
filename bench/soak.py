"""A stack at saturation for half an hour, and what it leaves behind: pages, descriptors, threads and memory.

Gateway, head, rank and the server of grammar trials run as an operator starts them, with the fake runner, whose pages
and tokens are certified, or with the micro model on a GPU (`--device cuda`), in few pages that are poisoned when they
are given back: requests are preempted and cached pages evicted all the time. Five to ten times as many clients as
there are slots ask over HTTP for plain, streamed, constrained and impossible things with prompts that share prefixes; a
fifth of them leave early. Every answer is checked. The memory of every process is sampled; its slope is a least-squares
line over the second half. At the end all must be given back.

What is held before is told after a warm-up with the same load, in which pools of threads and capped caches fill.

What was seen is written down every half minute, marked as not finished and held to nothing, until the end replaces it:
a soak that is killed leaves evidence.

    python bench/soak.py --minutes 30
    python bench/soak.py --minutes 8 --warm-up-minutes 1 --device cuda
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import httpx
import psutil
from harness.processes import MICRO_MODEL, Gateway, free_port, wait_for, worker_counters
from report import Bar, Plot, save, write
from soak_load import Crowd

# A GPU answers faster than clients ask, unless they are more.
NUM_CLIENTS = {"none": 160, "cpu": 160, "cuda": 320}
SAMPLE_S = 5.0
SAMPLES_A_NOTE = 6  # half a minute
START_TIMEOUT_S = 300.0  # kernels may have to be compiled
FLAGS = (
    "--poison-freed-pages --max-total-tokens 8192 --max-running-requests 32"
    " --chunked-prefill-size 512 --schedule-conservativeness 0.05 --constraint-cache-mib 16"
    " --constraint-compile-ms 20000"
)
RUNNER_FLAGS = {
    "none": "--runner fake --fake-step-ms 80",
    "cpu": "--device cpu",
    "cuda": "--device cuda --cuda-graph-bs 1 4 8 16 24 32",
}
# Of half an hour and more; allocators settle slower than that.
SLOPE_LIMIT_MIB_H = 8.0
SLOPE_FROM_MINUTES = 20.0
# Of a model's questions; what it misses on its own is below half of this.
MISSED_LIMIT = 0.05

Sample = dict[str, Any]


def name_of(process: psutil.Process) -> str:
    """Which of the stack's programs it is."""
    words = " ".join(process.cmdline())
    for module, name in (("grammar.trial", "trial"), ("baleen_worker.rank", "rank"), ("baleen_worker", "head")):
        if module in words:
            return name
    return "gateway"


def sample(gateway: Gateway, began_s: float) -> Sample:
    """What each program holds now. A child of the trial server lives for one trial and belongs to it."""
    rss_mib: dict[str, float] = {}
    threads: Counter[str] = Counter()
    fds = 0
    for process in gateway.family():
        try:
            name = name_of(process)
            if name == "trial" and "trial" in rss_mib:
                continue
            rss_mib[name] = round(process.memory_info().rss / 2**20, 2)
            fds += process.num_fds()
            threads.update(f"{name} {thread}" for thread in thread_names(process.pid))
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
    minutes = (time.monotonic() - began_s) / 60
    return {"minutes": minutes, "rss_mib": rss_mib, "fds": fds, "threads": dict(sorted(threads.items()))}


def thread_names(pid: int) -> list[str]:
    """What the threads of a process call themselves, their numbers left out."""
    return [(task / "comm").read_text().strip().rstrip("0123456789") for task in Path(f"/proc/{pid}/task").iterdir()]


def slope_mib_per_hour(samples: Sequence[Sample], name: str | None) -> float:
    """Of one program, or with None of all together, over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    times = [s["minutes"] / 60 for s in half]
    values = [sum(s["rss_mib"].values()) if name is None else s["rss_mib"].get(name, 0.0) for s in half]
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0


def settled(gateway: Gateway) -> bool:
    """Whether nothing is live anywhere."""
    metrics = gateway.metrics()
    names = ("baleen_active_requests", "baleen_worker_running_requests", "baleen_worker_waiting_requests")
    return all(metrics[name] == 0 for name in names)


@dataclass(frozen=True, slots=True)
class Course:
    """What was seen of a stack while a crowd was at work. `loads`: its metrics for as long as they asked for more."""

    crowd: Crowd
    samples: list[Sample] = field(default_factory=list[Sample])
    loads: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @property
    def waiting(self) -> list[float]:
        """Requests that waited for their turn, a number a sample."""
        return self._requests("waiting")

    def _requests(self, what: str) -> list[float]:
        """At the first sample nobody has asked yet."""
        return [load[f"baleen_worker_{what}_requests"] for load in self.loads[1:]]

    def facts(self) -> dict[str, Any]:
        """What is written down of it, at the end or on the way."""
        samples, waiting, tally = self.samples, self.waiting, self.crowd.tally
        return {
            "seconds": round(samples[-1]["minutes"] * 60),
            "requests": dict(tally.done),
            "checked_tokens": tally.tokens,
            "wrong_answers": len(tally.wrong),
            "wrong": tally.wrong[:10],
            "missed": tally.missed,
            "mean_waiting_requests": round(sum(waiting) / len(waiting), 1),
            "waiting_requests": [round(count) for count in waiting],
            "running_requests": [round(count) for count in self._requests("running")],
            "rss_slope_mib_per_hour": {
                name: round(slope_mib_per_hour(samples, name), 2) for name in sorted(samples[-1]["rss_mib"])
            },
            "samples": samples[:: int(60 / SAMPLE_S)],
        }


async def soak(gateway: Gateway, crowd: Crowd, seconds: float) -> Course:
    """Watches the stack while the crowd is at work, and writes down what it has seen so far as it goes."""
    began_s = time.monotonic()
    work = asyncio.create_task(crowd.run(seconds))
    course = Course(crowd)
    while not work.done():
        course.samples.append(await asyncio.to_thread(sample, gateway, began_s))
        if time.monotonic() - began_s < seconds:
            course.loads.append(await asyncio.to_thread(gateway.metrics))
        if len(course.samples) % SAMPLES_A_NOTE == 0:
            await asyncio.to_thread(save, "soak", {"finished": False} | course.facts(), [])
        await asyncio.wait([work], timeout=SAMPLE_S)
    work.result()
    return course


def plot_of(samples: Sequence[Sample]) -> Plot:
    """Memory of each program, one point a minute."""
    every = max(int(60 / SAMPLE_S), 1)
    names = sorted(samples[-1]["rss_mib"])
    series = {name: [(s["minutes"], s["rss_mib"].get(name, 0.0)) for s in samples[::every]] for name in names}
    return Plot("Memory under saturation", "minutes", "resident memory, MiB", series)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a soak has shown. `own`: the worker's counters; `freed`: pages that its cache gave back at the end."""

    course: Course
    before: Sample
    after: Sample
    metrics: dict[str, float]
    own: dict[str, float]
    freed: int


def measure(arguments: argparse.Namespace) -> Seen:
    """One soak of a stack that is started and ended here."""
    port, asks_model = free_port(), arguments.device != "none"
    num_clients = NUM_CLIENTS[arguments.device]
    flags = f"{RUNNER_FLAGS[arguments.device]} {FLAGS} --metrics-port {port}"
    # Programs of the harness get a clean environment; packages that are not installed are named to them.
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    with Gateway("serve", str(MICRO_MODEL), *flags.split(), env=path) as gateway:
        gateway.ready(START_TIMEOUT_S)
        warm_up = Crowd(gateway.url, num_clients, 0, asks_model=asks_model)
        asyncio.run(warm_up.run(arguments.warm_up_minutes * 60))
        wait_for("the warm-up has ended", lambda: settled(gateway))
        httpx.post(f"{gateway.url}/flush_cache").raise_for_status()
        time.sleep(2)  # connections of the warm-up are closed by then
        before = sample(gateway, time.monotonic())
        crowd = Crowd(gateway.url, num_clients, arguments.seed, asks_model=asks_model)
        course = asyncio.run(soak(gateway, crowd, arguments.minutes * 60))
        wait_for("everybody has been answered", lambda: settled(gateway))
        metrics, own = gateway.metrics(), worker_counters(port)
        freed = httpx.post(f"{gateway.url}/flush_cache").raise_for_status().json()["freed_pages"]
        time.sleep(2)
        after = sample(gateway, time.monotonic())
    return Seen(course, before, after, metrics, own, freed)


def bars_of(seen: Seen, arguments: argparse.Namespace) -> list[Bar]:
    """What a soak is held to."""
    before, after, tally = seen.before, seen.after, seen.course.crowd.tally
    more_threads = sum(after["threads"].values()) - sum(before["threads"].values())
    bars = [
        Bar("wrong answers", len(tally.wrong), 0, "answers"),
        Bar("pages held by requests at the end", seen.metrics["baleen_worker_used_kv_pages"], 0, "pages"),
        Bar("pages lost to the cache at the end", seen.own["baleen_worker_cached_pages"] - seen.freed, 0, "pages"),
        Bar("requests in flight at the end", seen.metrics["baleen_active_requests"], 0, "requests"),
        Bar("file descriptors more than before", after["fds"] - before["fds"], 0, "descriptors"),
        Bar("threads more than before", more_threads, 0, "threads"),
        Bar("samples in which nobody waited", sum(not count for count in seen.course.waiting), 0, "samples"),
    ]
    if arguments.device != "none":
        missed = tally.missed / max(tally.done["plain"], 1)
        bars.append(Bar("questions that the model missed", round(missed, 4), MISSED_LIMIT, "of all"))
    if arguments.minutes >= SLOPE_FROM_MINUTES:
        total = slope_mib_per_hour(seen.course.samples, None)
        bars.append(Bar("growth of memory, second half", round(total, 2), SLOPE_LIMIT_MIB_H, "MiB/h"))
    return bars


def facts_of(seen: Seen) -> dict[str, Any]:
    """What is written down beside the bars."""
    return {
        "finished": True,
        **seen.course.facts(),
        "worker": {name: seen.own[name] for name in sorted(seen.own) if name.startswith("baleen_worker_")},
        "flushed_pages": seen.freed,
        "before": seen.before,
        "after": seen.after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=RUNNER_FLAGS, default="none", help="none: the fake runner (default)")
    arguments = parser.parse_args()
    seen = measure(arguments)
    write("soak", facts_of(seen), bars_of(seen, arguments), plot_of(seen.course.samples))


if __name__ == "__main__":
    main()
