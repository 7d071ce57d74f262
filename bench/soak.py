"""A worker at saturation with random aborts, and what it leaves behind: pages, file descriptors, threads and memory.

Starts a worker with the fake runner, whose pages and tokens are certified, in few pages, so that requests are preempted
and cached pages evicted all the time. Several streams submit prompts that share prefixes, abort a tenth of them at
random moments, and are cut off now and then. Samples of the worker's processes are taken every second; the slope of
their memory is a least-squares line over the second half. At the end everything must be given back.

python bench/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker" / "tests" / "core"))

from baleen_worker.pb import worker_pb2 as pb
from report import Bar, write
from worker_process import Client, GatewayStream, WorkerProcess, copy_model, make_submit

NUM_STREAMS = 4
LIVE_PER_STREAM = 24
ABORT_SHARE = 0.1
CUT_SHARE = 0.002
VOCAB_SIZE = 1500


class Gateway:
    """One stream that keeps requests in flight."""

    def __init__(self, client: Client, draw: random.Random) -> None:
        self.client, self.draw = client, draw
        self.next_key = 0
        self.num_done = 0
        self.stream = client.connect()

    def turn(self) -> None:
        """Submits, aborts and reads a frame; sometimes it goes away and comes back."""
        draw, stream = self.draw, self.stream
        live = [key for key in range(1, self.next_key + 1) if key not in stream.ended]
        if draw.random() < CUT_SHARE:
            self.num_done += len(stream.ended)
            stream.call.cancel()
            self.stream, self.next_key = self.client.connect(), 0
            return
        submits: list[pb.Submit] = []
        while len(live) + len(submits) < LIVE_PER_STREAM:
            self.next_key += 1
            family = random.Random(draw.randrange(8))
            prompt = [family.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 600))]
            submits.append(make_submit(self.next_key, [*prompt, draw.randrange(VOCAB_SIZE)], draw.randrange(1, 300)))
        aborts = [pb.Abort(key=draw.choice(live))] if live and draw.random() < ABORT_SHARE else []
        if submits or aborts:
            stream.send(submits=submits, aborts=aborts)
        stream.next()

    def finish(self) -> None:
        """Reads until nothing is live."""
        stream: GatewayStream = self.stream
        stream.read_until(lambda: len(stream.ended) == self.next_key)
        self.num_done += len(stream.ended)


def sample(worker: WorkerProcess) -> dict[str, Any]:
    """What the worker's processes hold now."""
    family = worker.family()
    return {
        "seconds": time.monotonic(),
        "rss_mib": sum(process.memory_info().rss for process in family) / 2**20,
        "fds": sum(process.num_fds() for process in family),
        "threads": sum(process.num_threads() for process in family),
    }


def slope(samples: list[dict[str, Any]]) -> float:
    """MiB an hour over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    times = [s["seconds"] / 3600 for s in half]
    values = [s["rss_mib"] for s in half]
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    return sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    seconds = parser.parse_args().minutes * 60
    draw = random.Random(1)
    flags = "--max-total-tokens 8192 --max-running-requests 64 --chunked-prefill-size 512 --schedule-conservativeness 0"
    with tempfile.TemporaryDirectory() as folder:
        model = copy_model(Path(folder))
        with WorkerProcess(model, *flags.split()) as worker, Client(worker.address) as client:
            gateways = [Gateway(client, draw) for _ in range(NUM_STREAMS)]
            before, samples = sample(worker), [sample(worker)]
            ends_s = time.monotonic() + seconds
            while (now_s := time.monotonic()) < ends_s:
                draw.choice(gateways).turn()
                if now_s - samples[-1]["seconds"] >= 1.0:
                    samples.append(sample(worker))
            for gateway in gateways:
                gateway.finish()
            listener = client.connect()
            listener.read_until(lambda: listener.load.running_requests == 0)
            load, after = listener.load, sample(worker)
            freed = client.flush().freed_pages
    write(
        "soak",
        {
            "seconds": round(seconds),
            "requests": sum(gateway.num_done for gateway in gateways),
            "steps": load.steps,
            "preemptions": load.preemptions,
            "cached_tokens": load.cached_tokens,
            "flushed_pages": freed,
            "before": before,
            "after": after,
            "rss_slope_mib_per_hour": round(slope(samples), 2),
        },
        [
            Bar("pages held by requests at the end", load.used_pages, 0, "pages"),
            Bar("pages lost to the cache at the end", load.cached_pages - freed, 0, "pages"),
            Bar("file descriptors more than before", after["fds"] - before["fds"], 2, "descriptors"),
            Bar("threads more than before", after["threads"] - before["threads"], 2, "threads"),
        ],
    )


if __name__ == "__main__":
    main()
