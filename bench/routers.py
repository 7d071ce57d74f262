"""The gateway beside routers that others use: processor time a request and a streamed token, latency, memory, overload.

Every router stands alone between the same client and a mock server that gives the same tokens at the same pace; the
gateway's mock speaks the worker contract, theirs speaks OpenAI's API. The gateway's figures include rendering,
tokenizing, detokenizing and parsing; the others forward bytes. All of it runs in one go on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import PEERS, free_port
from report import ROOT, Bar, Bars, host_class, write
from rig import CpuTime, Mock, Router, allow_many_files, build_mock, mock_binary, put_load, report_of, start_load

OURS = "baleen"
# At most as much as the cheapest of the others; a cold long prompt has a limit of its own, since they tokenize nothing.
RATIO_LIMIT = 1.0
COLD_LIMIT_US = 450.0
TOKEN_LIMIT_US, TOKEN_USER_LIMIT_US = 10.0, 3.0
STREAM_LIMIT_KIB = 32.0
GAP_LIMIT_MS = 5.0
ADDED_P50_LIMIT_MS, ADDED_P99_LIMIT_MS = 0.3, 2.0
LOST_GOODPUT_LIMIT = 0.1

REQUEST_KINDS = ("short", "cold", "warm")
REQUEST_CLIENTS = 16
# Streams that one engine step moves, and its length: 32,000 tokens a second.
STREAMS, STEP_US = 64, 2000
SHORT_TOKENS, LONG_TOKENS = 50, 550
OPEN_STREAMS = 10_000
FAST_STREAMS, FAST_STEP_US, FAST_RATE = 100, 2000, 50_000
PEAK_CLIENTS = 32
LOAD_SHARE = 0.7
# A server of 32 requests at a time, 50 ms each.
SLOTS, SLOT_STEP_US, SLOT_TOKENS, OVERLOAD = 32, 10_000, 5, 5


@dataclass(frozen=True, slots=True)
class Bench:
    """What is the same for every router."""

    gateway: Path
    tokenizer: Path
    peers_folder: Path
    seconds: float

    def command(self, name: str, port: int, upstream_port: int, *more: str) -> list[str]:
        """Command line of a router in front of a server."""
        if name == OURS:
            limits = more or ("--max-concurrent-requests", "20000")
            worker = ["--worker", f"127.0.0.1:{upstream_port}", *limits]
            return [str(self.gateway), "--port", str(port), *worker, "--log-level", "warn"]
        peer = next(peer for peer in PEERS if peer.name == name)
        return peer.arguments(self.peers_folder, port, upstream_port)

    @contextmanager
    def stand(self, name: str, *more: str, step_us: int = 0, max_running: int = 65536) -> Iterator[Router]:
        """A router that is ready, with its mock server behind it."""
        with ExitStack() as running:
            kind = "worker" if name == OURS else "openai"
            mock = running.enter_context(Mock(kind, self.tokenizer, step_us=step_us, max_running=max_running))
            port = free_port()
            router = Router(self.command(name, port, mock.port, *more), port)
            yield running.enter_context(router).ready()


def measure_requests(bench: Bench, name: str) -> dict[str, Any]:
    """Processor time of requests that are answered with one token, by what they say."""
    result: dict[str, Any] = {}
    with bench.stand(name) as router:
        spent = CpuTime(0.0, 0.0)
        for kind in REQUEST_KINDS:
            put_load(router.port, connections=REQUEST_CLIENTS, seconds=0.5, body=kind)
            seen, cpu = router.answered(connections=REQUEST_CLIENTS, seconds=bench.seconds, body=kind)
            result[kind] = cpu.per(require_good(name, seen)) | pick(seen, "good_per_s", "latency_us")
        spent = router.cpu()
        router.stop()
        # What it spent in its life by wait4, and by the readings that the figures above come from.
        result["life_cpu_s"] = {"wait4": router.total and sum_of(router.total), "read": sum_of(spent)}
    return result


def measure_tokens(bench: Bench, name: str) -> dict[str, Any]:
    """Processor time of a streamed token: the slope between short and long streams, each step writing to every one."""
    with bench.stand(name, step_us=STEP_US) as router:
        options: dict[str, Any] = {"connections": STREAMS, "stream": True, "seconds": 60}
        put_load(router.port, **options, tokens=SHORT_TOKENS, requests=STREAMS)
        rounds = max(1, round(bench.seconds / (LONG_TOKENS * STEP_US / 1e6))) * STREAMS
        short, short_cpu = router.answered(**options, tokens=SHORT_TOKENS, requests=rounds)
        long, long_cpu = router.answered(**options, tokens=LONG_TOKENS, requests=rounds)
    require_good(name, short)
    require_good(name, long)
    if long["events"] < rounds * SHORT_TOKENS:
        raise RuntimeError(f"{name} streamed only {long['events']} events of {rounds * LONG_TOKENS} tokens")
    long["tokens_per_s"] = rounds * LONG_TOKENS / long["seconds"]
    slope = (long_cpu - short_cpu).per(rounds * (LONG_TOKENS - SHORT_TOKENS))
    return slope | pick(long, "tokens_per_s", "gap_us")


def measure_latency(bench: Bench) -> dict[str, Any]:
    """What the gateway adds to a request at a share of its peak, against the client straight at a mock server."""
    with bench.stand(OURS) as router:
        put_load(router.port, connections=PEAK_CLIENTS, seconds=0.5)
        peak = put_load(router.port, connections=PEAK_CLIENTS, seconds=bench.seconds)
        rate = round(LOAD_SHARE * peak["good_per_s"], 1)
        load: dict[str, Any] = {"connections": 4 * PEAK_CLIENTS, "rate": rate, "seconds": bench.seconds}
        through = put_load(router.port, **load)
    with Mock("openai", bench.tokenizer) as mock:
        put_load(mock.port, connections=PEAK_CLIENTS, seconds=0.5)
        direct = put_load(mock.port, **load)
    added = {f"added_{p}_ms": (through["latency_us"][p] - direct["latency_us"][p]) / 1e3 for p in ("p50", "p99")}
    return {"peak_per_s": peak["good_per_s"], "offered_per_s": rate, **added, "through": through, "direct": direct}


def measure_open_streams(bench: Bench) -> dict[str, Any]:
    """Memory of streams that are open and get a token a second."""
    with bench.stand(OURS, step_us=1_000_000) as router:
        put_load(router.port, connections=STREAMS, requests=STREAMS, stream=True, tokens=2)
        before = peak = open_bytes = router.resident_bytes()
        most_open = 0
        load = start_load(
            router.port, connections=OPEN_STREAMS, requests=OPEN_STREAMS, stream=True, tokens=12, seconds=60
        )
        while load.poll() is None:
            active, resident = router.num_active(), router.resident_bytes()
            peak = max(peak, resident)
            # The last look at the most streams: what their beginning took for a moment has been given back.
            if active >= most_open:
                most_open, open_bytes = active, resident
            time.sleep(0.1)
        require_good(OURS, report_of(load))
    if most_open < OPEN_STREAMS:
        raise RuntimeError(f"only {most_open} of {OPEN_STREAMS} streams were open at one time")
    return {"streams": most_open, "before_bytes": before, "open_bytes": open_bytes, "peak_bytes": peak}


def measure_fast_streams(bench: Bench) -> dict[str, Any]:
    """Gaps between tokens while many streams run fast."""
    with bench.stand(OURS, step_us=FAST_STEP_US) as router:
        tokens = round(bench.seconds * 1e6 / FAST_STEP_US)
        load: dict[str, Any] = {"connections": FAST_STREAMS, "stream": True, "requests": FAST_STREAMS, "seconds": 60}
        put_load(router.port, **load, tokens=50)
        seen, cpu = router.answered(**load, tokens=tokens)
    total = require_good(OURS, seen) * tokens
    # Tokens that come while a client is busy share an event, so events count for less than tokens.
    return {"tokens_per_s": total / seen["seconds"]} | pick(seen, "events", "gap_us") | cpu.per(total)


def measure_overload(bench: Bench) -> dict[str, Any]:
    """Answers a second at the peak, and when several times as many are asked for."""
    limits = ["--max-concurrent-requests", str(SLOTS), "--queue-size", str(SLOTS)]
    with bench.stand(OURS, *limits, step_us=SLOT_STEP_US, max_running=SLOTS) as router:
        load: dict[str, Any] = {"tokens": SLOT_TOKENS, "seconds": bench.seconds}
        peak = put_load(router.port, connections=2 * SLOTS, **load)
        over = put_load(router.port, connections=512, rate=OVERLOAD * peak["good_per_s"], **load)
    kept = over["good_per_s"] / peak["good_per_s"]
    return {"peak": peak, "overload": over, "goodput_kept": round(kept, 4)}


def require_good(name: str, seen: dict[str, Any]) -> int:
    """How many answers came; RuntimeError when one of them was no success."""
    if set(seen["by_status"]) != {"200"}:
        raise RuntimeError(f"{name} answered with {seen['by_status']}")
    return seen["good"]


def pick(seen: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: seen[name] for name in names}


def sum_of(cpu: CpuTime) -> float:
    return round(cpu.user_s + cpu.system_s, 2)


def bars(routers: dict[str, Any], own: dict[str, Any]) -> list[Bar]:
    """Every limit with what was measured."""
    others = [result for name, result in routers.items() if name != OURS]
    ours = routers[OURS]

    def ratio(*path: str) -> float:
        def value(result: dict[str, Any]) -> float:
            for name in path:
                result = result[name]
            return result["cpu_us"]

        return value(ours) / min(value(result) for result in others)

    streams, fast, latency = own["open_streams"], own["fast_streams"], own["latency"]
    stream_kib = (streams["open_bytes"] - streams["before_bytes"]) / streams["streams"] / 1024
    token = ours["token"]
    comparison = []
    if others:
        comparison = [
            Bar("CPU of a 0.5 KB request over the cheapest other router's", ratio("short"), RATIO_LIMIT, "ratio"),
            Bar("CPU of a 16 KB conversation's turn over theirs", ratio("warm"), RATIO_LIMIT, "ratio"),
        ]
    return [
        *comparison,
        Bar("CPU of a request with 16 KB of new text", ours["cold"]["cpu_us"], COLD_LIMIT_US, "µs"),
        Bar(f"CPU of a streamed token, {STREAMS} streams a step", token["cpu_us"], TOKEN_LIMIT_US, "µs"),
        Bar("of which user time", token["user_us"], TOKEN_USER_LIMIT_US, "µs"),
        Bar(f"memory of an open stream, {OPEN_STREAMS} of them", stream_kib, STREAM_LIMIT_KIB, "KiB"),
        Bar(f"p99 gap at {FAST_RATE} tokens/s in all", fast["gap_us"]["p99"] / 1e3, GAP_LIMIT_MS, "ms"),
        Bar(f"share of {FAST_RATE} tokens/s missed", 1 - fast["tokens_per_s"] / FAST_RATE, 0.02, "share"),
        Bar("added p50 at 70 % of peak", latency["added_p50_ms"], ADDED_P50_LIMIT_MS, "ms"),
        Bar("added p99 at 70 % of peak", latency["added_p99_ms"], ADDED_P99_LIMIT_MS, "ms"),
        Bar(
            f"goodput lost at {OVERLOAD} times the peak",
            1 - own["overload"]["goodput_kept"],
            LOST_GOODPUT_LIMIT,
            "share",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement that can be taken by itself. `place` is where it stands in the result."""

    place: tuple[str, ...]
    measure: Callable[[Bench], dict[str, Any]]

    @property
    def name(self) -> str:
        return "-".join(self.place)


def parts(names: Sequence[str]) -> list[Part]:
    """All of them, those that are compared close together in time."""
    compared = [
        *(Part(("routers", name, "requests"), partial(measure_requests, name=name)) for name in names),
        *(Part(("routers", name, "token"), partial(measure_tokens, name=name)) for name in names),
    ]
    own = {
        "latency": measure_latency,
        "fast_streams": measure_fast_streams,
        "overload": measure_overload,
        "open_streams": measure_open_streams,
    }
    return [*compared, *(Part((OURS, name), measure) for name, measure in own.items())]


class Kept:
    """Parts that were measured, each in a file, so that a run can stop between two of them and go on later.

    What another build, another host or other options gave is measured again.
    """

    def __init__(self, folder: Path, stamp: Mapping[str, Any]) -> None:
        self._folder = folder
        self._stamp = dict(stamp)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: Part) -> dict[str, Any] | None:
        """What was measured; None where that is still to be done."""
        path = self._path(part)
        document: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return document["result"] if document.get("stamp") == self._stamp else None

    def put(self, part: Part, result: dict[str, Any]) -> None:
        self._path(part).write_text(json.dumps({"stamp": self._stamp, "result": result}), "utf-8")

    def _path(self, part: Part) -> Path:
        return self._folder / f"{part.name}.json"


def collect(bench: Bench, names: Sequence[str], kept: Kept, minutes: float) -> tuple[dict[str, Any], bool]:
    """Takes the parts that are missing until the time is over; returns the results and whether they are whole."""
    deadline = time.monotonic() + 60 * minutes
    results: dict[str, Any] = {"routers": {name: {} for name in names}, OURS: {}}
    whole = True
    for part in parts(names):
        found = kept.get(part)
        if found is None and time.monotonic() < deadline:
            found = part.measure(bench)
            kept.put(part, found)
            print(part.name, flush=True)
        if found is None:
            whole = False
            continue
        kind, name, *rest = part.place
        if rest == ["requests"]:
            results[kind][name] |= found
        elif rest:
            results[kind][name][rest[0]] = found
        else:
            results[kind][name] = found
    return results, whole


def main() -> int:
    """Measures every router, then what only the gateway is held to. Exit code 3 where parts are still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load (default %(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models/micro/tokenizer.json", help="tokenizer.json")
    parser.add_argument("--peers", type=Path, help="folder that keeps the other routers (default: a temporary one)")
    parser.add_argument("--no-peers", action="store_true", help="measure the gateway alone; write nothing")
    parser.add_argument("--keep", type=Path, help="folder that keeps what was measured, to go on from after a stop")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no measurement after this time")
    options = parser.parse_args()
    gateway = Path(os.environ.get("BALEEN_GATEWAY", ROOT / ".venv/bin/gateway"))
    build_mock()
    allow_many_files()
    names = [OURS] if options.no_peers else [OURS, *(peer.name for peer in PEERS)]
    stamp = {
        "gateway": hashlib.sha256(gateway.read_bytes()).hexdigest(),
        "mock": hashlib.sha256(Path(mock_binary()).read_bytes()).hexdigest(),
        "tokenizer": hashlib.sha256(options.tokenizer.read_bytes()).hexdigest(),
        "seconds": options.seconds,
        "host": host_class(),
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(gateway, options.tokenizer, options.peers or Path(folder), options.seconds)
        kept = Kept(options.keep or Path(folder) / "kept", stamp)
        results, whole = collect(bench, names, kept, options.minutes)
    if not whole:
        print("not whole: run the same command again to go on")
        return 3
    routers, own = results["routers"], results[OURS]
    found = bars(routers, own)
    if options.no_peers:
        for bar in found:
            print(
                f"{'ok    ' if bar.met else 'MISSED'} {bar.what}: {bar.measured:.4g} {bar.unit} (at most {bar.limit:g})"
            )
        return 0
    chart = Bars(
        title="CPU of the router process",
        y_label="µs",
        groups=["0.5 KB request", "16 KB, new text", "16 KB, next turn", "streamed token × 10"],
        series={
            name: [*(result[kind]["cpu_us"] for kind in REQUEST_KINDS), 10 * result["token"]["cpu_us"]]
            for name, result in routers.items()
        },
    )
    write("routers", {"routers": routers, OURS: own}, found, chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
