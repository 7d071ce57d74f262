"""What the prefix cache costs and what it saves.

Costs, without a model: time to find a prompt of 128K tokens, and memory of the tree a page. Savings, with the micro
model on this machine: 64 requests whose prompts share 1024 tokens and end with 32 of their own, 8 tokens of output
each, through the real engine, with the cache and without it. CPU time of the process is what is compared, so that the
ratio holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))

from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS, PrefixCache, page_keys
from baleen_worker.config import WorkerConfig
from baleen_worker.engine import Engine
from baleen_worker.messages import Command, Event, Submit
from baleen_worker.request import Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from report import ROOT, Bar, write

FIND_TOKENS = 128 * 1024
VOCAB_SIZE = 129280
NUM_REQUESTS, NUM_SHARED, NUM_OWN, NUM_OUTPUT = 64, 1024, 32, 8
MODEL = ROOT / "models" / "micro"


def measure_tree(repeats: int) -> dict[str, Any]:
    """Milliseconds to find a long prompt, and bytes of the tree a page."""
    draw = random.Random(1)
    token_ids = [draw.randrange(VOCAB_SIZE) for _ in range(FIND_TOKENS)]
    keys = page_keys(token_ids)
    num_pages = FIND_TOKENS // PAGE_SIZE_TOKENS
    pool = PagePool(num_pages + 1)
    pages = pool.alloc(num_pages)
    gc.collect()
    tracemalloc.start()
    cache = PrefixCache(pool)
    node = cache.root("")
    cache.hold(node)
    for place, page in enumerate(pages):
        start = place * PAGE_SIZE_TOKENS
        node = cache.extend(node, page_keys(token_ids[start : start + PAGE_SIZE_TOKENS]), page)
    cache.release(node)
    cache.take_events()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    times_ms: list[float] = []
    for _ in range(repeats):
        began_s = time.thread_time()
        path = cache.find("", keys, num_pages)
        times_ms.append((time.thread_time() - began_s) * 1000)
        if len(path) != num_pages:
            raise RuntimeError("the prompt was not found")
    times_ms.sort()
    result = {
        "pages": num_pages,
        "find_median_ms": round(times_ms[repeats // 2], 3),
        "find_p90_ms": round(times_ms[repeats * 9 // 10], 3),
        "bytes_per_page": round(num_bytes / num_pages, 1),
    }
    print(result, flush=True)
    return result


class Lines:
    """Inbox and outbox of the engine."""

    def __init__(self, commands: list[Command]) -> None:
        self.commands = commands
        self.num_tokens = 0

    def drain(self, *, wait: bool) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def publish(self, event: Event) -> None:
        self.num_tokens += sum(len(columns.token_ids) for columns in getattr(event, "streams", ()))


def measure_sharing(*, with_cache: bool, depth: int) -> dict[str, Any]:
    """CPU seconds that the shared-prefix workload takes on the micro model."""
    from baleen_worker.runner import build_runner

    config = WorkerConfig(MODEL, device="cpu", max_total_tokens=1 << 17, max_running_requests=NUM_REQUESTS)
    built = build_runner(config)
    pages = PagePool(built.num_pages)
    limits = SchedulerLimits(NUM_REQUESTS, config.chunked_prefill_size, NUM_REQUESTS)
    scheduler = Scheduler(limits, pages, PrefixCache(pages) if with_cache else None)
    draw = random.Random(2)
    shared = [draw.randrange(16, 1500) for _ in range(NUM_SHARED)]
    requests = [
        Request(
            (1, key),
            shared + [draw.randrange(16, 1500) for _ in range(NUM_OWN)],
            SamplingParams(max_tokens=NUM_OUTPUT, seed=key, temperature=0.0),
        )
        for key in range(NUM_REQUESTS)
    ]
    lines = Lines([Submit(requests)])
    engine = Engine(scheduler, built.runner, lines, lines, depth=depth)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while engine.turn() or not scheduler.idle:
        pass
    cpu_s, wall_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    if lines.num_tokens != NUM_REQUESTS * NUM_OUTPUT:
        raise RuntimeError(f"{lines.num_tokens} tokens came out")
    load = scheduler.load
    result = {
        "with_cache": with_cache,
        "steps_in_flight": depth,
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "steps": load.steps,
        "prompt_tokens_computed": load.prompt_tokens,
        "prompt_tokens_found": load.cached_tokens,
    }
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="searches measured (default %(default)s)")
    tree = measure_tree(parser.parse_args().repeats)
    on, overlapped, off = (
        measure_sharing(with_cache=with_cache, depth=depth) for with_cache, depth in ((True, 1), (True, 2), (False, 1))
    )
    write(
        "prefix_cache",
        {
            "tree": tree,
            "sharing": [on, overlapped, off],
            "speed_up": round(off["cpu_s"] / on["cpu_s"], 2),
            "overlap_over_no_overlap_cpu": round(overlapped["cpu_s"] / on["cpu_s"], 3),
        },
        [
            Bar("find a prompt of 128K tokens, CPU time", tree["find_median_ms"], 1.0, "ms"),
            Bar("memory of the tree", tree["bytes_per_page"], 1024, "bytes/page"),
            Bar("64 requests sharing 1K tokens, with the cache over without", on["cpu_s"] / off["cpu_s"], 0.2, "ratio"),
        ],
    )


if __name__ == "__main__":
    main()
