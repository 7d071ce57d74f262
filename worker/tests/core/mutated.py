"""Runs tests on a product that is broken on purpose. A plugin breaks it, told which way by BALEEN_MUTATION."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
# Of a break: (what it is put into, the name there, what is there instead).
Patch = tuple[Any, str, Any]


def apply(mutations: Mapping[str, Sequence[Patch]]) -> None:
    """Breaks the product in this process, if it is to be broken. Raises KeyError for a break that does not exist."""
    if "BALEEN_MUTATION" in os.environ:
        for owner, name, broken in mutations[os.environ["BALEEN_MUTATION"]]:
            setattr(owner, name, broken)


def run_tests(
    plugin: str, mutation: str | None, suites: Sequence[str], *options: str
) -> subprocess.CompletedProcess[str]:
    """The tests of files under worker/tests, but the slow ones, with a break or none, until the first that is red."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    arguments += ["-m", "not slow", "-p", plugin, *options]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join((str(TESTS / "core"), *sys.path))}
    if mutation is not None:
        environment["BALEEN_MUTATION"] = mutation
    return subprocess.run(
        [*arguments, *(str(TESTS / suite) for suite in suites)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
