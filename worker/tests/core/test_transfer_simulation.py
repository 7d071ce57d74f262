"""The legs' state machines in a simulated world: no stale page is accepted, every leg ends once, all pages come back.

BALEEN_SIMULATION_SEEDS asks for more seeds than a usual run takes; a failure names its seed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from transfer_world import Checks, World

NUM_SEEDS = int(os.environ.get("BALEEN_SIMULATION_SEEDS", "1000"))
ALL, LENT = Checks(), Checks(lent=True)


def run(seed: int, checks: Checks = ALL) -> Counter[str]:
    world = World(seed, checks)
    try:
        world.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world.seen


@pytest.mark.parametrize("checks", [ALL, LENT])
def test_all_seeds(checks: Checks) -> None:
    seen = sum((run(seed, checks) for seed in range(NUM_SEEDS)), Counter[str]())
    wanted = {
        *("decode arrived", "decode failed", "decode stopped", "decode restarted"),
        *("prefill handed over", "prefill aborted", "prefill lease ended", "prefill restarted"),
        *("cut", "damaged", "preempted", "stale"),
    }
    assert wanted <= {name for name, count in seen.items() if count >= NUM_SEEDS // 100}, seen
    assert seen["decode arrived"] > NUM_SEEDS, "hardly anything ever works"


def test_a_seed_gives_one_course_of_events() -> None:
    assert run(3) == run(3)


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("checks", [Checks(digests=False), Checks(digests=False, generations=False)])
def test_without_checks_something_foreign_is_accepted(checks: Checks, lent: bool) -> None:
    """Else the world could not tell."""
    checks = replace(checks, lent=lent)
    with pytest.raises(AssertionError, match="foreign"):
        _ = [run(seed, checks) for seed in range(NUM_SEEDS)]
