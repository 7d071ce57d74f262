"""The micro model's suites through the API on a GPU: each attention backend, with and without graphs and IndexCache.

IndexCache is served from `models/micro-index-cache`, the weights that were trained for it.
Each variant is a stack as an operator starts it, asked the questions of `python -m baleen_eval`; some run side by side.
The result says what was computed with, as the worker's log does, and holds every suite against its bar.

    python bench/gpu_evaluation.py --out FILE [--num 40] [--jobs 3] [--commit C] [VARIANT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness.processes import MICRO_MODEL, ROOT, Gateway
from report import hardware

COMMON = (
    "--device cuda --mem-fraction-static 0.2 --max-total-tokens 600000 --max-running-requests 32"
    " --cuda-graph-bs 1 4 8 16 24 32"
)
# By what attention is computed with; the default of each kind of keys first.
_TORCH = "--dsa-prefill-backend torch --dsa-decode-backend torch"
_TRITON = "--dsa-prefill-backend triton --dsa-decode-backend triton"
_TILELANG = "--dsa-prefill-backend tilelang --dsa-decode-backend tilelang"
_FP8 = "--kv-cache-dtype fp8_e4m3"
_BACKENDS = {
    "bf16": "",
    "fp8": _FP8,
    "bf16 triton": _TRITON,
    "fp8 triton": f"{_FP8} {_TRITON}",
    "bf16 tilelang": _TILELANG,
    "bf16 fa3": "--dsa-decode-backend fa3",
    "bf16 torch": _TORCH,
    "fp8 torch": f"{_FP8} {_TORCH}",
}
_EAGER = "--disable-cuda-graph"
_INDEX_CACHE = ", IndexCache"
_MODES = {"": "", _INDEX_CACHE: "", ", eager": _EAGER, f", eager{_INDEX_CACHE}": _EAGER}
# A graph cannot hold what torch does: it is eager by itself.
VARIANTS = {
    backend + mode: f"{flags} {more}"
    for mode, more in _MODES.items()
    for backend, flags in _BACKENDS.items()
    if _EAGER not in more or _TORCH not in flags
} | {"host tier": "--enable-hierarchical-cache --hicache-ratio 2 --max-total-tokens 65536"}
# The middle one of its layers reuses the selection of the first, whose indexer was trained for both.
INDEX_CACHE_MODEL = ROOT / "models" / "micro-index-cache"
LENGTHS = (512, 2048, 8192, 16384)
BARS = {"needle": 0.97, "track": 0.95, "arith": 0.95, "tools": 0.95}
LONGEST_NEEDLE_BAR = 0.90  # at the longest texts; the other bar is over all others
START_TIMEOUT_S = 300.0
PARALLEL = 24


def evaluate(name: str, num: int, suites: list[str]) -> dict[str, Any]:
    """One variant's answers; a stack that does not start, or does not answer, is a result too."""
    flags = f"{COMMON} {VARIANTS[name]}".split()
    model = INDEX_CACHE_MODEL if name.endswith(_INDEX_CACHE) else MICRO_MODEL
    started_s = time.monotonic()
    result: dict[str, Any] = {"variant": name, "model": model.name, "flags": " ".join(flags), "suites": {}}
    path = {key: os.environ[key] for key in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES") if key in os.environ}
    try:
        with Gateway("serve", str(model), *flags, env=path) as gateway:
            gateway.ready(START_TIMEOUT_S)
            result["start_s"] = round(time.monotonic() - started_s, 1)
            said = [line.partition("rank: ")[2] for line in gateway.log().splitlines()]
            result["computed_with"] = [line for line in said if "arithmetic" in line or "without CUDA graphs" in line]
            for suite in suites:
                result["suites"][suite] = ask(gateway.url, suite, num)
    except Exception as error:  # noqa: BLE001 - whatever stopped it, the other variants are measured
        result["error"] = f"{type(error).__name__}: {error}"[-3000:]
    result["seconds"] = round(time.monotonic() - started_s, 1)
    result["met"] = "error" not in result and all(suite["met"] for suite in result["suites"].values())
    print(f"{name}: {summary(result)}", flush=True)
    return result


def ask(url: str, suite: str, num: int) -> dict[str, Any]:
    """One suite's shares of right answers, and whether they meet the bars."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "baleen_eval", "--base-url", url, "--suite", suite, "--num", str(num)]
        command += ["--seed", "7", "--parallel", str(PARALLEL), "--json", str(out)]
        if suite in ("needle", "track"):
            command += ["--lengths", *map(str, LENGTHS)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if not out.exists():
            raise TimeoutError(f"{suite} could not be asked: {done.stdout[-1000:]}")
        found = json.loads(out.read_text("utf-8"))
    buckets = {bucket: counts["correct"] / counts["n"] for bucket, counts in found["by_bucket"].items()}
    longest = buckets.get(str(LENGTHS[-1])) if suite == "needle" else None
    others = [counts for bucket, counts in found["by_bucket"].items() if bucket != str(LENGTHS[-1]) or longest is None]
    share = sum(counts["correct"] for counts in others) / sum(counts["n"] for counts in others)
    met = share >= BARS[suite] and (longest is None or longest >= LONGEST_NEEDLE_BAR)
    return {
        "n": found["n"],
        "correct": found["correct"],
        "transport_errors": found["transport_errors"],
        "by_bucket": {bucket: round(value, 4) for bucket, value in buckets.items()},
        "share": round(share, 4),
        "bar": BARS[suite],
        "met": met and not found["transport_errors"],
        "seconds": found["seconds"],
    }


def bars_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One a variant; one that did not get through has none."""
    bars: list[dict[str, Any]] = []
    for result in (result for result in results if "error" not in result):
        missed = sum(not suite["met"] for suite in result["suites"].values())
        what = f"suites of the micro model below their bar, {result['variant']}"
        bars.append({"what": what, "measured": missed, "limit": 0, "unit": "suites", "met": missed == 0})
    return bars


def summary(result: dict[str, Any]) -> str:
    """One line."""
    shares = [f"{suite} {found['correct']}/{found['n']}" for suite, found in result["suites"].items()]
    end = result.get("error", "bars met" if result["met"] else "BARS MISSED")
    return f"{', '.join(shares)}; {end} ({result['seconds']} s)"


def main() -> int:
    """Exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=40, help="questions of each suite, and of each length")
    parser.add_argument("--jobs", type=int, default=3, help="stacks at a time")
    parser.add_argument("--suites", nargs="+", choices=BARS, default=list(BARS))
    parser.add_argument("--commit", default="")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"any of: {', '.join(VARIANTS)}")
    args = parser.parse_args()
    unknown = set(args.variants) - VARIANTS.keys()
    if unknown:
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    document: dict[str, Any] = {
        "benchmark": "evaluation",
        "command": f"python bench/gpu_evaluation.py {' '.join(sys.argv[1:])}",
        "commit": args.commit,
        "hardware": hardware(),
        "lengths": LENGTHS,
        "bars": [],
        "measurements": [],
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(evaluate, name, args.num, args.suites) for name in args.variants or VARIANTS]
        for run in as_completed(runs):
            document["measurements"].append(run.result())
            document["bars"] = bars_of(document["measurements"])
            args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if all(variant["met"] for variant in document["measurements"]) else 1


if __name__ == "__main__":
    sys.exit(main())
