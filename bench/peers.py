"""Routers that the gateway is measured beside, installed for the occasion and started in front of a mock server.

Each gets a virtual environment of its own under a folder that is kept between runs, with the version named here. They
forward HTTP and nothing else: no tokenizer, no parser, no cache-aware routing.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """A router on PyPI. `command` starts it; {python}, {bin}, the ports and {upstream} are filled in."""

    name: str
    requirement: str
    command: tuple[str, ...]

    def install(self, folder: Path) -> Path:
        """Makes the environment, if it is not there, and returns its bin folder. RuntimeError with pip's last words."""
        environment = folder / self.requirement.replace("==", "-")
        ready = environment / ".ready"
        if not ready.exists():
            shutil.rmtree(environment, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
            command = [find_uv(), "pip", "install", "--quiet", "--python", environment / "bin" / "python"]
            done = subprocess.run([*command, self.requirement], stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{self.requirement} cannot be installed: {done.stderr.strip()[-400:]}")
            ready.touch()
        return environment / "bin"

    def arguments(self, folder: Path, port: int, upstream_port: int) -> list[str]:
        """The command line, listening on `port` in front of the server on `upstream_port`."""
        place = self.install(folder)
        fields = {
            "python": str(place / "python"),
            "bin": str(place),
            "port": str(port),
            "metrics_port": str(free_port()),
            "upstream": f"http://127.0.0.1:{upstream_port}",
        }
        return [word.format(**fields) for word in self.command]


_ADDRESSES = ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{metrics_port}")
# The cheapest policy each has, and no line of log a request.
_COMMON = (*_ADDRESSES, "--worker-urls", "{upstream}", "--policy", "round_robin", "--max-concurrent-requests", "20000")
_SGLANG = ("{python}", "-m", "sglang_router.launch_router")
PEERS = (
    Peer("smg", "smg==1.13.0", ("{bin}/smg", "launch", *_COMMON, "--log-level", "warn")),
    Peer("sglang-router", "sglang-router==0.3.2", (*_SGLANG, *_COMMON, "--log-level", "warn")),
    Peer("vllm-router", "vllm-router==0.1.17", ("{bin}/vllm-router", *_COMMON, "--log-level", "warning")),
)


def find_uv() -> str:
    """The uv of the environment that runs this, else one on PATH."""
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise RuntimeError("uv is not installed; `make setup` installs it")
    return uv


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
