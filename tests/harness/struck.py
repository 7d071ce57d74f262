"""The environment of a worker whose runner is struck by a fault; see `faults/sitecustomize.py`."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULT_TOKEN = 666


def struck(fault: str, mark: Path) -> dict[str, str]:
    """`mark`: a file that the first worker makes which is struck."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    places = [str(ROOT / "tests" / "harness" / "faults"), str(ROOT / "worker"), str(ROOT / "kernels"), *given]
    return {
        "PYTHONPATH": os.pathsep.join(places),
        "BALEEN_TEST_FAULT": fault,
        "BALEEN_TEST_FAULT_MARK": str(mark),
    }
