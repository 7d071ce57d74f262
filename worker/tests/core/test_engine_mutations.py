"""Each rule of the host tier is broken once, in a process of its own: its tests must turn red."""

from __future__ import annotations

import mutated
import pytest
from engine_mutations import MUTATIONS

SUITES = ("core/test_host_tier.py", "run/test_host_pool.py", "core/test_preemption.py")


@pytest.mark.slow
def test_whole_the_suites_are_green() -> None:
    """Else red would mean nothing."""
    ended = mutated.run_tests("engine_mutations", None, SUITES)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_rule_that_is_broken_is_noticed(mutation: str) -> None:
    ended = mutated.run_tests("engine_mutations", mutation, SUITES)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert " failed" in ended.stdout
