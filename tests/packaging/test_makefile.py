"""What make settles before anything is built."""

from __future__ import annotations

import os
import subprocess

from harness.processes import ROOT


def test_what_cargo_builds_stays_in_its_checkout() -> None:
    # Cargo names what it builds by places within a checkout: two that share a folder are given each other's programs.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "CARGO_"))}
    command = ["make", "--no-print-directory", "--eval", "shown: ; @echo $(CARGO_TARGET_DIR)", "shown"]
    shown = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(ROOT / "target")
