"""Files what `python -m baleen_bench slice7` measured: bench/results/<gpu>/slice7.json, of all variants, and its plots.

python bench/gpu_slice_report.py MEASURED.json …, one file a variant, of one run. The page beside is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from report import RESULTS, Plot, draw


def main() -> int:
    """Writes the files and names them."""
    documents: list[dict[str, Any]] = [json.loads(Path(name).read_text("utf-8")) for name in sys.argv[1:]]
    rows = [row for document in documents for row in document["measurements"] if "error" not in row]
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", documents[0]["hardware"]["gpu"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "slice7.json"
    common = {name: documents[0][name] for name in ("benchmark", "commit", "hardware", "slice", "routing")}
    command = "; ".join(document["command"] for document in documents)
    result = {**common, "command": command, "bars": bars_of(rows), "measurements": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    draw(decode_plot(rows), path.with_suffix(".svg"))
    draw(prefill_plot(rows), folder / "slice7-prefill.svg")
    print(path, path.with_suffix(".svg"), folder / "slice7-prefill.svg", sep="\n")
    return 0


def bars_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars of the bfloat16 variant as the table in bench/README.md reads them. A least rate is a longest time."""
    bars: list[dict[str, Any]] = []
    for row in (row for row in rows if row["variant"] == "bf16"):
        name = f"slice7 batch {row['batch']}, {row['context'] // 1024}K"
        if "bar_decode_ms" in row:
            bars.append(_bar(f"{name} decode", row["decode_ms"], row["bar_decode_ms"], "ms/step"))
        if "bar_prefill_tok_s" in row and row["batch"] == 16:
            bars.append(_bar(f"{name} prefill", 1e6 / row["prefill_tok_s"], 1e6 / row["bar_prefill_tok_s"], "us/token"))
    return bars


def _bar(what: str, measured: float, limit: float, unit: str) -> dict[str, Any]:
    return {
        "what": what,
        "measured": round(measured, 3),
        "limit": round(limit, 2),
        "unit": unit,
        "met": measured <= limit,
    }


def decode_plot(rows: list[dict[str, Any]]) -> Plot:
    """Milliseconds a step by batch, beside the peer's and the bars."""
    at_4k = [row for row in rows if row["context"] == 4096]
    series = {
        f"Baleen, {variant} keys": [(row["batch"], row["decode_ms"]) for row in at_4k if row["variant"] == variant]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    for label, name in (("peer", "peer_decode_ms"), ("bar", "bar_decode_ms")):
        series[label] = [(row["batch"], row[name]) for row in at_4k if row["variant"] == "bf16" and name in row]
    return Plot("Decode of v32-slice7 at 4K", "rows", "ms a step", series, log_x=True)


def prefill_plot(rows: list[dict[str, Any]]) -> Plot:
    """Tokens a second by length of prompts, 16 of them, beside the peer's and the bars."""
    wide = [row for row in rows if row["batch"] == 16]
    series = {
        f"Baleen, {variant} keys": [(row["context"], row["prefill_tok_s"]) for row in wide if row["variant"] == variant]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    for label, name in (("peer", "peer_prefill_tok_s"), ("bar", "bar_prefill_tok_s")):
        series[label] = [(row["context"], row[name]) for row in wide if row["variant"] == "bf16"]
    return Plot("Prefill of v32-slice7, 16 prompts", "tokens of a prompt", "tokens/s", series, log_x=True)


if __name__ == "__main__":
    sys.exit(main())
