"""What a routing decision costs, and what each policy gains on simulated fleets.

Runs gateway/benches/routing: the gateway's own router, workers that are simulated. See there for the traces.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from report import ROOT, Bar, Plot, draw, write

DECISION_LIMIT_US = 20.0
PAGE_LIMIT_BYTES = 64.0
HIT_GAIN = 2.0
# Of the grid that is measured, what a deployment is like: a fleet sees more than its caches hold together. Where one
# worker alone could hold every system prompt, each of them does, and round robin finds half of all tokens anyway.
FLEET, CACHE = 16, 750
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
    gain = result["gain"]
    chosen = next(cell for cell in gain["grid"] if (cell["workers"], cell["pages_each"]) == (FLEET, CACHE))
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
            f"cached share of round robin over that of cache_aware, shared conversations, {FLEET} workers whose caches "
            f"together hold {FLEET * CACHE / gain['distinct_pages']:.0%} of the trace's distinct pages "
            f"({chosen['round_robin']:.3f} over {chosen['cache_aware']:.3f}; no routing could come below "
            f"{chosen['round_robin'] / gain['most_possible']:.2f})",
            chosen["round_robin"] / chosen["cache_aware"],
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


def scale_plot(result: dict[str, Any]) -> Plot:
    """Waits for the first token by policy, at 100 requests a second for each worker: the largest fleet has 100,000."""
    sizes = {int(size): policies for size, policies in result["scale"].items()}
    return Plot(
        title="Mean time to the first token at 100 requests/s a worker",
        x_label="workers",
        y_label="seconds",
        series={name: [(size, policies[name]["ttft_mean_s"]) for size, policies in sizes.items()] for name in POLICIES},
        log_x=True,
    )


def main() -> None:
    """Measures, prints and writes the result."""
    result = measure()
    grid = result["gain"]["grid"]
    caches = sorted({cell["pages_each"] for cell in grid})
    series = {
        f"{policy}, {pages} pages": [(cell["workers"], cell[policy]) for cell in grid if cell["pages_each"] == pages]
        for policy in ("cache_aware", "round_robin")
        for pages in caches
    }
    plot = Plot(
        title="Prompt tokens found in a cache, by the size of the fleet and of each worker's cache",
        x_label="workers",
        y_label="share of all prompt tokens",
        series=series,
        limit=result["gain"]["most_possible"],
        log_x=True,
    )
    path = write("routing", result, bars(result), plot)
    draw(scale_plot(result), path.with_name("routing-scale.svg"))


if __name__ == "__main__":
    main()
