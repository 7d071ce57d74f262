"""Our own CUDA reads and writes what is its own, after it was written, and its threads wait for each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from baleen_kernels.machine import find_nvcc

pytestmark = pytest.mark.gpu


def _sanitizer() -> str:
    nvcc = find_nvcc()
    beside = None if nvcc is None else shutil.which("compute-sanitizer", path=str(nvcc.parent))
    found = beside or shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_no_access_is_wrong(tool: str) -> None:
    command = [_sanitizer(), "--tool", tool, "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, str(Path(__file__).with_name("run_sanitized.py"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "all calls of" in done.stdout
