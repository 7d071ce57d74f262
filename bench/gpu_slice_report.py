"""Files what `python -m baleen_bench slice7` measured: bench/results/<gpu>/slice7.json, of all variants, and its plots.

With --steady, what `slice7 --steady` measured: context.json and its plot, or a rank's <slice>.json.

python bench/gpu_slice_report.py MEASURED.json …, one file a variant, of one run. The page beside is written by hand.
python bench/gpu_slice_report.py --steady MEASURED.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from report import RESULTS, Plot, draw

MOST_US_PER_K = 2.6
HIDDEN_AT = 128


def main() -> int:
    """Writes the files and names them."""
    is_steady = sys.argv[1:2] == ["--steady"]
    names = sys.argv[2:] if is_steady else sys.argv[1:]
    documents: list[dict[str, Any]] = [json.loads(Path(name).read_text("utf-8")) for name in names]
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", documents[0]["hardware"]["gpu"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    if is_steady:
        if documents[0]["benchmark"] != "v32-slice7":
            return file_rank(documents[0], folder / f"{documents[0]['benchmark']}.json")
        return file_steady(documents[0], folder / "context.json")
    rows = [row for document in documents for row in document["measurements"] if "error" not in row]
    path = folder / "slice7.json"
    common = {name: documents[0][name] for name in ("benchmark", "commit", "hardware", "slice", "routing")}
    command = "; ".join(document["command"] for document in documents)
    result = {**common, "command": command, "bars": bars_of(rows), "measurements": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    draw(decode_plot(rows), path.with_suffix(".svg"))
    draw(prefill_plot(rows), folder / "slice7-prefill.svg")
    print(path, path.with_suffix(".svg"), folder / "slice7-prefill.svg", sep="\n")
    return 0


def file_steady(document: dict[str, Any], path: Path) -> int:
    """The cost of context, as a line, and what of the host's time is not hidden."""
    line = document["over_context"]
    [widest] = [entry for entry in document["hidden"] if entry["batch"] == HIDDEN_AT]
    slope, shown = line["us_per_query_per_k"], 1 - widest["share_hidden"]
    bars = [
        _bar("cost of 1K of context, a query, 61 layers", slope, MOST_US_PER_K, "us"),
        _bar("cost of context, what no line explains (1 - R2)", 1 - line["r_squared"], 0.01, "of the variance"),
        _bar(f"host time between steps that is not hidden, {HIDDEN_AT} rows", shown, 0.05, "of the host's time"),
    ]
    path.write_text(json.dumps(document | {"bars": bars}, indent=1) + "\n", "utf-8")
    points = [(point["context"] / 1024, point["ms"]) for point in line["points"]]
    fitted = [(k, line["base_ms"] + line["slope_ms_per_k"] * k) for k, _ in points]
    title = f"Decode of v32-slice7 over context, {line['batch']} rows"
    series = {f"Baleen, {document['variant']} keys": points, "a line": fitted}
    draw(Plot(title, "K tokens of context", "ms a step", series), path.with_suffix(".svg"))
    print(path, path.with_suffix(".svg"), sep="\n")
    return 0


def file_rank(document: dict[str, Any], path: Path) -> int:
    """A step of one rank, in batches of its own."""
    name = document["benchmark"]
    limited = [row for row in document["decode"] if "bar_ms" in row]
    bars = [_bar(f"{name} batch {row['batch']}, 4K", row["ms"], row["bar_ms"], "ms/step") for row in limited]
    path.write_text(json.dumps(document | {"bars": bars}, indent=1) + "\n", "utf-8")
    print(path)
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
    for label, name in (("peer", _of_peer("decode_ms", rows)), ("bar", "bar_decode_ms")):
        series[label] = [(row["batch"], row[name]) for row in at_4k if row["variant"] == "bf16" and name in row]
    return Plot("Decode of v32-slice7 at 4K", "rows", "ms a step", series, log_x=True)


def prefill_plot(rows: list[dict[str, Any]]) -> Plot:
    """Tokens a second by length of prompts, 16 of them, beside the peer's and the bars."""
    wide = [row for row in rows if row["batch"] == 16]
    series = {
        f"Baleen, {variant} keys": [(row["context"], row["prefill_tok_s"]) for row in wide if row["variant"] == variant]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    for label, name in (("peer", _of_peer("prefill_tok_s", rows)), ("bar", "bar_prefill_tok_s")):
        series[label] = [(row["context"], row[name]) for row in wide if row["variant"] == "bf16" and name in row]
    return Plot("Prefill of v32-slice7, 16 prompts", "tokens of a prompt", "tokens/s", series, log_x=True)


def _of_peer(name: str, rows: list[dict[str, Any]]) -> str:
    """The peer's figures of the same run, if it was measured with ours; else those of another."""
    return f"run_peer_{name}" if any(f"run_peer_{name}" in row for row in rows) else f"peer_{name}"


if __name__ == "__main__":
    sys.exit(main())
