"""A living stack under faults: a few rows always, all of them with `make test-all`; `make chaos` has more seeds.

Which rows come beside the fixed ones is drawn from BALEEN_CHAOS_SEED, as their schedules are, so that a pipeline that
counts it up comes by all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos.faults import ROWS
from chaos.run import Stage, Verdict, describe, run, run_beside

# Each breaks another part: a process, a link, a gateway, a worker by its request, a moment, and the pages between two.
SHORT_ROWS = ["kill-worker", "reset", "kill-gateway", "deadly-request", "pairs-kill-at-reserved", "pages-corrupt"]
NUM_DRAWN = 2
SEED = int(os.environ.get("BALEEN_CHAOS_SEED", "1"))

Play = Callable[[str], Verdict]

# How long a stack takes to be whole again is measured by `make chaos`, not here.
SLACK = 20.0


def short_rows() -> list[str]:
    """The fixed ones, and those that the seed draws; those of one kind of stack together."""
    others = [row for row in ROWS if row not in SHORT_ROWS]
    drawn = random.Random(SEED).sample(others, NUM_DRAWN)
    return sorted([*SHORT_ROWS, *drawn], key=lambda row: ROWS[row].roles)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Plays schedules on one stack, as far as the rows let it."""
    with asyncio.Runner() as runner:
        stage = Stage(tmp_path_factory.mktemp("ledgers"), SLACK)
        try:
            yield lambda row: runner.run(stage.play(row, SEED))
        finally:
            runner.run(stage.aclose())


@pytest.mark.parametrize("row", short_rows())
def test_a_row_holds(play: Play, row: str) -> None:
    verdict = play(row)
    assert not verdict.problems, describe(verdict)
    assert verdict.num_asked > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_rows_hold(tmp_path: Path) -> None:
    schedules = [(row, seed) for seed in (SEED, SEED + 1) for row in ROWS]
    jobs = max((os.cpu_count() or 1) // 2, 1)
    work = run_beside(schedules, jobs, tmp_path, SLACK) if jobs > 1 else run(schedules, tmp_path, SLACK)
    verdicts = asyncio.run(work)
    bad = [describe(verdict) for verdict in verdicts if verdict.problems]
    assert not bad, "\n" + "\n".join(bad)
    assert all(verdict.num_asked > 0 for verdict in verdicts)
