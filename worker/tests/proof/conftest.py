"""Puts the modules of this folder, and those of the other suites that it builds on, on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
for folder in ("proof", "core", "model", "run"):
    sys.path.insert(0, str(TESTS / folder))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tensors are small: more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)
