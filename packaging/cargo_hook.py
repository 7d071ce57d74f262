"""Build hook of the `baleen` wheel: compiles the gateway with cargo and ships it as a script of the wheel.

Hatchling calls it for wheels only, plain and editable. `BALEEN_CARGO_PROFILE` picks the cargo profile (default
`release`); `CARGO_TARGET_DIR` is honoured, so that a developer's build cache is reused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARY = "gateway"


class CargoBuildHook(BuildHookInterface[Any]):
    """Adds the compiled gateway to the wheel and tags the wheel for this platform and any Python 3."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before the wheel is written; `version` is "standard" or "editable"."""
        del version
        cargo = shutil.which("cargo")
        if cargo is None:
            raise SystemExit(
                "error: building baleen needs Rust's cargo, which is not on PATH; install it with: "
                "curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
            )
        binary = build_gateway(cargo, Path(self.root), os.environ.get("BALEEN_CARGO_PROFILE", "release"))
        build_data["shared_scripts"] = {str(binary): BINARY}
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def build_gateway(cargo: str, root: Path, profile: str) -> Path:
    """Compiles the gateway of the workspace at `root` and returns the path of the executable."""
    command = [cargo, "build", "--locked", "--profile", profile, "--bin", BINARY]
    command += ["--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=False)
    if built.returncode != 0:
        raise SystemExit(f"error: `{' '.join(command)}` failed in {root}; its messages are above")
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == BINARY:
            return Path(message["executable"])
    raise SystemExit(f"error: cargo reported no executable named {BINARY}")
