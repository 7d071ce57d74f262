"""How a measurement is written down: one JSON file a benchmark and class of host, with a plot beside it.

A result names the hardware, the commit and the command, so that it can be repeated. `bars` are the limits a measurement
is held against; a result that misses one is written down all the same.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit: `measured` must not exceed `limit`, both in `unit`."""

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over one axis. `series` maps a label to (x, y) points; `limit` is drawn as a dashed line."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    limit: float | None = None
    log_x: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars side by side. `series` maps a label to one value a group."""

    title: str
    y_label: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]


def write(name: str, measurements: Mapping[str, Any], bars: Sequence[Bar], plot: Plot | Bars | None = None) -> Path:
    """Writes bench/results/<host class>/<name>.json and its plot, prints the bars, and returns the file's path."""
    path = save(name, measurements, bars)
    if plot is not None:
        draw(plot, path.with_suffix(".svg"))
    for bar in bars:
        print(f"{'ok    ' if bar.met else 'MISSED'} {bar.what}: {bar.measured:.4g} {bar.unit} (at most {bar.limit:g})")
    return path


def save(name: str, measurements: Mapping[str, Any], bars: Sequence[Bar]) -> Path:
    """Writes the JSON file alone, whole or not at all, and returns its path."""
    folder = RESULTS / host_class()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "benchmark": name,
        "command": f"python bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "gateway", "worker", "kernels", "proto")),
        "hardware": hardware(),
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
        "measurements": measurements,
    }
    written = path.with_suffix(".json.new")
    written.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    written.replace(path)
    return path


def draw(plot: Plot | Bars, path: Path) -> None:
    """Draws lines with markers, or bars, as SVG; the file is the same for the same points."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "baleen"
    from matplotlib import pyplot

    inches = max(7, len(plot.groups) / 5) if isinstance(plot, Bars) else 7
    figure, axes = pyplot.subplots(figsize=(inches, 4))
    if isinstance(plot, Bars):
        width = 0.8 / len(plot.series)
        for number, (label, values) in enumerate(plot.series.items()):
            places = [group + number * width for group in range(len(plot.groups))]
            axes.bar_label(axes.bar(places, values, width, label=label), fmt="%.0f", fontsize=7)
        places = [group + 0.4 - width / 2 for group in range(len(plot.groups))]
        axes.set_xticks(places, plot.groups, rotation=90 if len(plot.groups) > 8 else 0)
        axes.set(title=plot.title, ylabel=plot.y_label)
    else:
        for label, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        if plot.limit is not None:
            axes.axhline(plot.limit, linestyle="--", color="grey", label=f"limit {plot.limit:g}")
        if plot.log_x:
            axes.set_xscale("log", base=2)
        axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def hardware() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu_model(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def host_class() -> str:
    """Folder name of hosts whose numbers may be compared: the GPU, else the processor and its number of cores."""
    model = gpu_model() or f"{os.cpu_count()}x {cpu_model()}"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu|@.*", "", model.lower())).strip("-")


def cpu_model() -> str:
    """Name of the processor as Linux gives it."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)$", info.read_text("utf-8"), re.MULTILINE) if info.exists() else None
    return match[1].strip() if match else platform.machine()


def gpu_model() -> str | None:
    """Name of the first GPU that the driver lists; None without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return listing.stdout.splitlines()[0].strip() if listing.stdout.strip() else None


def _git(*arguments: str) -> str:
    """What git says; nothing where there is no git or no repository, as on a machine that was lent."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
