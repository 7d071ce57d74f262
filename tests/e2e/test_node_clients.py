"""JavaScript clients against the scripted model; `node/clients.test.mjs` holds the tests themselves.

Nothing else here needs Node.js or npm's registry: where one is missing, this is left out and says why.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.processes import Gateway

SOURCES = Path(__file__).parent / "node"
# How long and how often npm asks a slow registry, and what it says of one that it did not reach: of packages that are
# not there it says something else.
PATIENCE = ["--fetch-timeout=30000", "--fetch-retries=3", "--fetch-retry-mintimeout=2000"]
NOT_REACHED = re.compile(r"npm error code (ENOTFOUND|EAI_AGAIN|E\w*TIMEDOUT|ECONN\w+|E\w+UNREACH|ERR_SOCKET\w*|E5\d\d)")
INSTALL_S = 240

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests and, beside them, the locked packages, of which no script is run."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs Node.js and npm")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "clients.test.mjs"):
        shutil.copy(SOURCES / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", *PATIENCE]
    try:
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm's registry gave no packages in {INSTALL_S} s")
    if NOT_REACHED.search(installed.stderr):
        pytest.skip("npm's registry was not reached")
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
