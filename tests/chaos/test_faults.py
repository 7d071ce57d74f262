"""A living stack under faults: short rows always, all of them with `make test-all`; `make chaos` has more seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from chaos.faults import ROWS
from chaos.run import describe, run

# Each breaks another part: a process, a link, a gateway, clients, and a request that breaks its worker.
SHORT_ROWS = ["kill-worker", "reset", "kill-gateway", "clients-leave", "deadly-request", "pairs-kill-worker"]


# How long a stack takes to be whole again is measured by `make chaos`, not here.
SLACK = 20.0


def hold(rows: Sequence[str], seeds: Sequence[int], folder: Path) -> None:
    verdicts = asyncio.run(run(rows, seeds, folder, SLACK))
    bad = [describe(verdict) for verdict in verdicts if verdict.problems]
    assert not bad, "\n" + "\n".join(bad)
    assert all(verdict.num_asked > 0 for verdict in verdicts)


def test_short_rows_hold(tmp_path: Path) -> None:
    hold(SHORT_ROWS, [1], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_rows_hold(tmp_path: Path) -> None:
    hold([*ROWS], [1, 2], tmp_path)
