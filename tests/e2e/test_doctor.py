"""`gateway doctor`: which kernels this machine would use, and one sentence where it can run none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from harness.processes import GATEWAY_BINARY


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GATEWAY_BINARY), "doctor", *arguments], capture_output=True, text=True, check=False, timeout=240
    )


def test_it_tells_what_the_kernels_tell() -> None:
    """In the interpreter that a worker would have."""
    told = doctor("--device", "cpu")
    first, rest = told.stdout.split("\n", 1)
    assert (told.returncode, told.stderr) == (0, "")
    assert re.fullmatch(r"gateway \S+; workers run on /\S+/python3", first)
    kernels = [sys.executable, "-m", "baleen_kernels", "doctor", "--device", "cpu"]
    assert rest == subprocess.run(kernels, capture_output=True, text=True, check=True).stdout
    assert "right on case" in rest


def test_whoever_has_read_enough_may_leave() -> None:
    left = subprocess.run(
        ["sh", "-c", f"{GATEWAY_BINARY} doctor --device cpu --no-check | head -1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert left.stdout.startswith("gateway ")
    assert left.stderr == ""


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    missing = doctor("--python", "/nowhere/python3")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "error: --python /nowhere/python3: there is no such program\n"
    bare = tmp_path / "python3"
    bare.write_text("#!/bin/sh\necho 3 12\necho torch\n")
    bare.chmod(0o755)
    lacking = doctor("--python", str(bare))
    assert (lacking.returncode, lacking.stdout, lacking.stderr.count("\n")) == (1, "", 1)
    assert lacking.stderr.startswith(f"error: {bare} has no PyTorch; install it with: {bare} -m pip install")


def test_a_flag_nobody_knows_is_named() -> None:
    told = doctor("--frobnicate")
    assert told.returncode == 2
    assert "--frobnicate" in told.stderr
