"""First token and speed of one stream on a CPU: the micro model through the whole stack, as `make serve` starts it.

The bars are held against processor time of gateway and worker, which an idle machine turns into as much wall time,
since one thread computes: on a machine that others use, wall time says how busy they are. Both are written down.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import psutil
from harness.processes import MICRO_MODEL, Gateway
from report import Bar, Plot, write

PROMPT_LENGTHS = (128, 512, 1024, 2048)
BAR_LENGTH = 512
NEW_TOKENS = 64
REPEATS = 3
FIRST_TOKEN_LIMIT_S = 1.0
TOKENS_PER_S = 20.0


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User and system time that the processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(gateway: Gateway, processes: list[psutil.Process], num_tokens: int, seed: int) -> dict[str, float]:
    """One stream: seconds to its first token, and for each token after it, by the wall and by processor time."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 2000) for _ in range(num_tokens)]
    marks: list[tuple[float, float]] = [(time.monotonic(), cpu_seconds(processes))]
    with gateway.client() as client:
        stream = client.completions.create(
            model="micro", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _ in stream:
            if len(marks) == 1:
                marks.append((time.monotonic(), cpu_seconds(processes)))
    marks.append((time.monotonic(), cpu_seconds(processes)))
    (wall, cpu), (first_wall, first_cpu), (last_wall, last_cpu) = marks
    return {
        "first_token_s": first_wall - wall,
        "first_token_cpu_s": first_cpu - cpu,
        "per_token_s": (last_wall - first_wall) / (NEW_TOKENS - 1),
        "per_token_cpu_s": (last_cpu - first_cpu) / (NEW_TOKENS - 1),
    }


def main() -> None:
    """Medians over several different prompts of each length, after one that warms up."""
    medians: dict[int, dict[str, float]] = {}
    with Gateway("serve", str(MICRO_MODEL)) as gateway:
        gateway.ready()
        processes = gateway.family()
        measure(gateway, processes, 64, seed=0)
        for num_tokens in PROMPT_LENGTHS:
            runs = [measure(gateway, processes, num_tokens, seed) for seed in range(REPEATS)]
            medians[num_tokens] = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
    at = medians[BAR_LENGTH]
    bars = [
        Bar(f"First token of {BAR_LENGTH}, processor time", at["first_token_cpu_s"], FIRST_TOKEN_LIMIT_S, "s"),
        Bar("Each further token, processor time", at["per_token_cpu_s"], 1 / TOKENS_PER_S, "s"),
    ]
    series = {
        "processor time": [(length, found["first_token_cpu_s"]) for length, found in medians.items()],
        "wall": [(length, found["first_token_s"]) for length, found in medians.items()],
    }
    plot = Plot("First token, micro model on a CPU", "prompt tokens", "seconds", series, limit=FIRST_TOKEN_LIMIT_S)
    write("cpu_serving", {"medians_by_prompt_tokens": medians, "repeats": REPEATS}, bars, plot)


if __name__ == "__main__":
    main()
