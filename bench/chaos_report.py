"""Writes down what the chaos suite found: reads the ledgers that `make chaos` keeps and judges each again.

python bench/chaos_report.py FOLDER
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from chaos.faults import ROWS
from chaos.ledger import read
from chaos.run import Verdict, verdict_of
from report import Bar, Bars, write


def main() -> int:
    """Exit code 1 when a schedule was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of ledgers")
    folder: Path = parser.parse_args().folder
    rows: dict[str, list[Verdict]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        head = read(path)[0]
        rows[head["row"]].append(verdict_of(head["row"], head["seed"], path))
    if not rows:
        raise SystemExit(f"error: {folder} holds no ledger; `make chaos` writes them")
    worst = {row: max(verdict.recovered_s or float("inf") for verdict in found) for row, found in rows.items()}
    every = [verdict for found in rows.values() for verdict in found]
    broken = [verdict for verdict in every if verdict.problems]
    measurements = {
        row: {
            "seeds": len(found),
            "requests": sum(verdict.num_asked for verdict in found),
            "failed": sum(verdict.num_failed for verdict in found),
            "may_fail": ROWS[row].may_fail,
            "broken": {verdict.seed: verdict.problems for verdict in found if verdict.problems},
            "slowest_recovery_s": worst[row],
        }
        for row, found in rows.items()
    }
    bars = [
        Bar(f"schedules in which something was lost, doubled, foreign, leaked or late, of {len(every)}",
            len(broken), 0, "schedules"),
        Bar("slowest recovery, as a share of its row's limit",
            max(worst[row] / ROWS[row].recover_s for row in rows), 1, "of the limit"),
    ]  # fmt: skip
    chart = Bars(
        title="Slowest recovery after a fault",
        y_label="seconds",
        groups=[*rows],
        series={"measured": [worst[row] for row in rows], "limit": [ROWS[row].recover_s for row in rows]},
    )
    write("chaos", measurements, bars, chart)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
