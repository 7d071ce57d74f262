"""What a routing decision costs, and what each policy gains on simulated fleets.

Runs gateway/benches/routing: the gateway's own router, workers that are simulated. See there for the traces.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from report import ROOT, Bar, Bars, write

DECISION_LIMIT_US = 20.0
PAGE_LIMIT_BYTES = 64.0
HIT_GAIN = 2.0
LOSS_LIMIT = 1.05
POLICIES = ("cache_aware", "prefix_hash", "least_load", "power_of_two", "round_robin")


def measure() -> dict[str, Any]:
    """What the Rust benchmark prints."""
    profile = os.environ.get("BALEEN_CARGO_PROFILE", "ci")
    command = ["cargo", "bench", "--quiet", "--locked", "--profile", profile, "--bench", "routing"]
    return json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def bars(result: dict[str, Any]) -> list[Bar]:
    """The decision's cost, and the policy that is the default against its simplest rivals."""
    decision, traces = result["decision"], result["conversations"]
    hits = {name: traces["shared"][name]["cached_share"] for name in POLICIES}
    waits = {name: traces["strangers"][name]["ttft_mean_s"] for name in POLICIES}
    largest = result["scale"]["1000"]["cache_aware"]
    return [
        Bar(
            "decision for a prompt of 8,192 tokens, 64 workers of 100,000 pages",
            decision["us_by_prompt_tokens"]["8192"]["p50"],
            DECISION_LIMIT_US,
            "µs",
        ),
        Bar("memory of a tracked page", decision["bytes_per_tracked_page"], PAGE_LIMIT_BYTES, "bytes"),
        Bar(
            "cached share of round robin over that of cache_aware, shared conversations, 8 workers "
            f"(no routing could come below {hits['round_robin'] / result['gain']['most_possible']:.2f})",
            hits["round_robin"] / hits["cache_aware"],
            1 / HIT_GAIN,
            "×",
        ),
        Bar(
            "the same, 64 workers",
            result["gain"]["64"]["round_robin"] / result["gain"]["64"]["cache_aware"],
            1 / HIT_GAIN,
            "×",
        ),
        Bar(
            "mean time to the first token of cache_aware over that of least_load, nothing shared",
            waits["cache_aware"] / waits["least_load"],
            LOSS_LIMIT,
            "×",
        ),
        Bar("decision among 1,000 workers at 100,000 requests/s", largest["decision_us"], DECISION_LIMIT_US, "µs"),
    ]


def main() -> None:
    """Measures, prints and writes the result."""
    result = measure()
    groups = ["conversations"] + [f"crowd, {size} workers" for size in result["scale"]]
    shares = [result["conversations"]["shared"], *result["scale"].values()]
    plot = Bars(
        title="Prompt tokens found in a cache, by policy",
        y_label="share of all prompt tokens",
        groups=groups,
        series={name: [share[name]["cached_share"] for share in shares] for name in POLICIES},
    )
    write("routing", result, bars(result), plot)


if __name__ == "__main__":
    main()
