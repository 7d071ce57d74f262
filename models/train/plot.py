"""`python -m models.train.plot LOG OUT.png`: loss and top-k recall of a training run, from its log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.train.plot", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    entries = [json.loads(line) for line in args.log.read_text().splitlines()]
    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, recalls = figure.subplots(2, 1, sharex=True)
    for key in ("main", "mtp", "index"):
        known = [(entry["tokens"] / 1e6, entry[key]) for entry in entries if key in entry]
        losses.plot(*zip(*known, strict=True), ".", markersize=3, label=key)
    losses.set_yscale("log")
    losses.set_ylabel("loss")
    losses.legend()
    for layer in range(4):
        known = [(entry["tokens"] / 1e6, entry["recall"][layer]) for entry in entries if "recall" in entry]
        recalls.plot(
            *zip(*known, strict=True), ".", markersize=3, label="MTP layer" if layer == 3 else f"layer {layer}"
        )
    recalls.set_ylabel("attention on the 256 selected keys")
    recalls.set_xlabel("million tokens")
    recalls.legend()
    figure.savefig(args.out, dpi=90)


if __name__ == "__main__":
    main()
