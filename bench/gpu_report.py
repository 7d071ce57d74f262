"""Files what `python -m baleen_bench` measured: bench/results/<gpu>/<name>.json, a table and a plot beside it.

python bench/gpu_report.py MEASURED.json [NAME], by default "kernels"; another name for a run of some ops alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from report import RESULTS


def main() -> int:
    """Writes the three files and names them."""
    result: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    folder = RESULTS / re.sub(r"[^a-z0-9]+", "-", result["hardware"]["gpu"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    bars = [bar_of(row) for row in result["measurements"] if "bar" in row]
    path = folder / f"{sys.argv[2] if len(sys.argv) > 2 else 'kernels'}.json"
    path.write_text(json.dumps(result | {"bars": bars}, indent=1) + "\n", "utf-8")
    path.with_suffix(".md").write_text(page(result), "utf-8")
    draw_roofline(result, path.with_suffix(".svg"))
    print(*(path.with_suffix(suffix) for suffix in (".json", ".md", ".svg")), sep="\n")
    return 0


def bar_of(row: dict[str, Any]) -> dict[str, Any]:
    """The bar of a measurement as the table in bench/README.md reads it: at most so many microseconds."""
    _, limit, unit = row["bar"].split()
    what, measured = f"{row['op']} by {row['backend']}, {row['shape']}", row["us"]
    if unit != "us":  # a least rate is a longest time
        limit = row["us"] * row["tb_s" if unit == "TB/s" else "tflops"] / float(limit)
    return {"what": what, "measured": measured, "limit": round(float(limit), 2), "unit": "us", "met": row["met"]}


def page(result: dict[str, Any]) -> str:
    """All measurements as Markdown."""
    hardware = result["hardware"]
    libraries = [f"{name} {hardware[name]}" for name in ("triton", "deep_gemm", "flash_mla", "fa3") if name in hardware]
    software = ", ".join([f"torch {hardware['torch']}", *libraries])
    lines = [
        f"# Kernels on {hardware['gpu']}",
        "",
        f"`{result['command']}` at commit {result['commit'][:8]}; {hardware['clocks']}; {software}.",
        "",
        ceilings_line(result["ceilings"]),
        "",
        "| op | backend | shape | µs | TB/s | TFLOP/s | of roofline | bar | of the library's time |",
        "|---|---|---|---:|---:|---:|---:|---|---:|",
    ]
    for row in result["measurements"]:
        cells = [row["op"], row["backend"], row["shape"]]
        if row["check"] != "ok":
            lines.append(f"| {' | '.join(cells)} | {row['check']} | | | | | |")
            continue
        bar = "" if "bar" not in row else f"{row['bar']} {'met' if row['met'] else '**missed**'}"
        numbers = [
            f"{row['us']:.1f}",
            row.get("tb_s", ""),
            row.get("tflops", ""),
            f"{row['share_of_roofline']:.0%}",
            bar,
        ]
        lines.append("| " + " | ".join(map(str, [*cells, *numbers, row.get("ratio_to_library", "")])) + " |")
    return "\n".join(lines) + "\n"


def ceilings_line(ceilings: dict[str, float]) -> str:
    """What the shares are shares of."""
    copy, bf16, fp8 = (ceilings[name] for name in ("copy_tb_s", "bf16_tflops", "fp8_tflops"))
    return (
        f"Ceilings measured in the same run: copy {copy:.2f} TB/s, bf16 {bf16:.0f} and fp8 {fp8:.0f} TFLOP/s. "
        "Times are medians over replays of a CUDA graph, inputs random. The roofline counts what the op cannot do "
        "without; data that fits the L2 cache can pass it."
    )


def draw_roofline(result: dict[str, Any], path: Path) -> None:
    """Share of the roofline of every measurement, as bars."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "baleen"
    from matplotlib import pyplot

    rows = [row for row in result["measurements"] if row["check"] == "ok"][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.2 * len(rows) + 1))
    axes.barh([f"{row['op']} {row['shape']}" for row in rows], [row["share_of_roofline"] for row in rows])
    axes.axvline(1.0, linestyle="--", color="grey")
    axes.tick_params(axis="y", labelsize=7)
    axes.set(title=f"Share of the roofline, {result['hardware']['gpu']}", xlim=(0, 1.2))
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
