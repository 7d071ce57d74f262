"""A living stack under faults: a few rows always, all of them with `make test-all`; `make chaos` has more seeds.

Which rows come beside the fixed ones is drawn from BALEEN_CHAOS_SEED, as their schedules are, so that a pipeline that
counts it up comes by all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from chaos.faults import ROWS
from chaos.run import Schedule, describe, run, run_beside

# Each breaks another part: a process, a link, a gateway, a worker by its request, a moment, and the pages between two.
SHORT_ROWS = ["kill-worker", "reset", "kill-gateway", "deadly-request", "pairs-kill-at-reserved", "pages-corrupt"]
NUM_DRAWN = 2
SEED = int(os.environ.get("BALEEN_CHAOS_SEED", "1"))

# How long a stack takes to be whole again is measured by `make chaos`, not here.
SLACK = 20.0


def hold(schedules: Sequence[Schedule], folder: Path, jobs: int = 1) -> None:
    work = run_beside(schedules, jobs, folder, SLACK) if jobs > 1 else run(schedules, folder, SLACK)
    verdicts = asyncio.run(work)
    bad = [describe(verdict) for verdict in verdicts if verdict.problems]
    assert not bad, "\n" + "\n".join(bad)
    assert all(verdict.num_asked > 0 for verdict in verdicts)


def test_short_rows_hold(tmp_path: Path) -> None:
    others = [row for row in ROWS if row not in SHORT_ROWS]
    drawn = random.Random(SEED).sample(others, NUM_DRAWN)
    hold([(row, SEED) for row in [*SHORT_ROWS, *drawn]], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_rows_hold(tmp_path: Path) -> None:
    hold([(row, seed) for seed in (SEED, SEED + 1) for row in ROWS], tmp_path, jobs=max((os.cpu_count() or 1) // 2, 1))
