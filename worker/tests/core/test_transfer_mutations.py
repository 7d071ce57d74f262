"""Each check of the transfer is taken out once, in a process of its own: the tests of transfers must turn red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transfer_mutations import MUTATIONS

FOLDER = Path(__file__).parent
SUITES = ("test_transfer_hostile.py", "test_transfer_tcp.py")


def run_suites(mutation: str | None) -> subprocess.CompletedProcess[str]:
    """The tests under that mutation, until the first that is red; a test that waits in vain is red after 5 s."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "5", "-p", "no:cacheprovider"]
    arguments += ["-p", "transfer_mutations", "-k", "not never and not nobody"]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
    if mutation is not None:
        environment["BALEEN_MUTATION"] = mutation
    return subprocess.run(
        [*arguments, *(str(FOLDER / suite) for suite in SUITES)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


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
