"""JavaScript clients against the scripted model; `node/clients.test.mjs` holds the tests themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.processes import Gateway

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests and, beside them, the locked packages, of which no script is run."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs Node.js and npm")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "clients.test.mjs"):
        shutil.copy(SOURCES / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder


def test_javascript_clients(scripted_stack: Gateway, packages: Path) -> None:
    finished = subprocess.run(
        ["node", "--test", "--test-reporter=tap"],
        cwd=packages,
        env=os.environ | {"BALEEN_URL": scripted_stack.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "# skipped 0" in finished.stdout
