"""CPU time of the gateway's text path: parsing output, tokenizing prompts, one streamed token.

Runs gateway/benches/text_path, which measures one thread's CPU time in process; see there for what is measured.
BALEEN_V32_TOKENIZER=/path/to/tokenizer.json measures with the whole vocabulary of DeepSeek-V3.2.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from report import ROOT, Bar, Plot, write

PLAIN_NS_PER_BYTE_LIMIT = 5.0  # 200 MB/s
DSML_NS_PER_BYTE_LIMIT = 20.0  # 50 MB/s
GROWTH_LIMIT = 2.1
PROMPT_LIMIT_US = NEXT_TURN_LIMIT_US = 1000.0
TOKEN_LIMIT_US = 3.0


def measure() -> dict[str, Any]:
    """What the Rust benchmark prints."""
    profile = os.environ.get("BALEEN_CARGO_PROFILE", "ci")
    command = ["cargo", "bench", "--quiet", "--locked", "--profile", profile, "--bench", "text_path"]
    return json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def bars(result: dict[str, Any]) -> list[Bar]:
    """The slowest of each kind, held against its limit."""
    parser, tokens, stream = result["parser"], result["tokens"], result["stream"]
    whole = next(row for row in parser["speeds"] if row["feed"] == "whole")
    steepest = max(parser["growth"], key=lambda row: row["ratio"])
    dearest = max(row["fold_and_event_ns_per_token"] for row in stream["outputs"])
    vocabulary = f"{tokens['tokenizer']} vocabulary"
    return [
        Bar("plain output, parsed", round(1e3 / whole["plain_mb_per_s"], 2), PLAIN_NS_PER_BYTE_LIMIT, "ns a byte"),
        Bar("tool calls, parsed", round(1e3 / whole["dsml_mb_per_s"], 2), DSML_NS_PER_BYTE_LIMIT, "ns a byte"),
        Bar(
            f"2 MB over 1 MB of the steepest of {len(parser['growth'])} hard outputs ({steepest['shape']})",
            steepest["ratio"],
            GROWTH_LIMIT,
            "×",
        ),
        Bar(f"prompt of 16 KB, cold, {vocabulary}", tokens["cold_prompt"]["us"], PROMPT_LIMIT_US, "µs"),
        Bar(
            f"next turn after 20 turns of 64K tokens, {vocabulary}",
            tokens["conversation"]["next_turn_us"],
            NEXT_TURN_LIMIT_US,
            "µs",
        ),
        Bar("fold and event of a streamed token", round(dearest / 1e3, 3), TOKEN_LIMIT_US, "µs"),
    ]


def main() -> None:
    """Measures, prints and writes the result."""
    result = measure()
    series: dict[str, list[tuple[float, float]]] = {}
    for feed in ("whole", "tokens", "characters"):
        ratios = sorted(row["ratio"] for row in result["parser"]["growth"] if row["feed"] == feed)
        series[feed] = [(float(place), ratio) for place, ratio in enumerate(ratios)]
    plot = Plot(
        title="Time for 2 MB of output over time for 1 MB, by shape",
        x_label="shape, in order of its ratio",
        y_label="ratio",
        series=series,
        limit=GROWTH_LIMIT,
    )
    write("text_path", result, bars(result), plot)


if __name__ == "__main__":
    main()
