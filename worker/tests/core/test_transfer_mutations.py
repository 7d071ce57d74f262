"""Each check of the transfer is taken out once, in a process of its own: the tests of transfers must turn red."""

from __future__ import annotations

import subprocess

import mutated
import pytest
from transfer_mutations import MUTATIONS


def run_suites(mutation: str | None) -> subprocess.CompletedProcess[str]:
    """The tests under that mutation; a test that waits in vain is red after 5 s."""
    suites = ("core/test_transfer_lent.py", "core/test_transfer_hostile.py", "core/test_transfer_tcp.py")
    options = ("--timeout", "5", "-k", "not never and not nobody")
    return mutated.run_tests("transfer_mutations", mutation, suites, *options)


@pytest.mark.slow
def test_whole_the_suites_are_green() -> None:
    """Else red would mean nothing."""
    ended = run_suites(None)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_a_check_a_suite_is_red(mutation: str) -> None:
    ended = run_suites(mutation)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert " failed" in ended.stdout
