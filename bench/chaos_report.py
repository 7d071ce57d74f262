"""Writes down what the chaos suite found: reads the ledgers that `make chaos` keeps and judges each again.

Of runs whose ledgers were too large to keep, what was printed is taken: one line a verdict. A ledger counts first.

python bench/chaos_report.py FOLDER [--printed LOG ...]
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from chaos.faults import ROWS
from chaos.ledger import read
from chaos.run import Verdict, told, verdict_of
from report import Bar, Bars, write


def main() -> int:
    """Exit code 1 when a schedule was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of ledgers")
    parser.add_argument("--printed", type=Path, nargs="+", default=[], metavar="LOG", help="what such a run printed")
    options = parser.parse_args()
    folder: Path = options.folder
    found_of: dict[tuple[str, int], Verdict] = {}
    for log in options.printed:
        lines = log.read_text("utf-8").splitlines()
        found_of |= {(verdict.row, verdict.seed): verdict for line in lines if (verdict := told(line))}
    for path in sorted(folder.glob("*.jsonl")):
        head = read(path)[0]
        found_of[head["row"], head["seed"]] = verdict_of(head["row"], head["seed"], path)
    rows: dict[str, list[Verdict]] = defaultdict(list)
    for (row, _), verdict in sorted(found_of.items()):
        rows[row].append(verdict)
    if not rows:
        raise SystemExit(f"error: {folder} holds no ledger; `make chaos` writes them")
    worst = {row: max(map(_recovery_s, found)) for row, found in rows.items()}
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


def _recovery_s(verdict: Verdict) -> float:
    return float("inf") if verdict.recovered_s is None else verdict.recovered_s


if __name__ == "__main__":
    sys.exit(main())
