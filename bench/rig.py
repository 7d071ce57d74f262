"""Processes around a measured router: mock server behind it, load in front of it, and what the router itself spends.

CPU time is read from the kernel before and after a load, for the router and its children; the total at its end comes
from wait4, and a result holds both, so that a sampling error shows.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from report import ROOT

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of processor time of a process and its children."""

    user_s: float
    system_s: float

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(self.user_s - earlier.user_s, self.system_s - earlier.system_s)

    def per(self, count: float) -> dict[str, float]:
        """Microseconds each, for `count` of something."""
        user, system = self.user_s / count * 1e6, self.system_s / count * 1e6
        return {"cpu_us": round(user + system, 3), "user_us": round(user, 3), "system_us": round(system, 3)}


class Program:
    """A process in a group of its own; leaving the block ends it."""

    def __init__(self, command: Sequence[str], *, reads_output: bool = False) -> None:
        environment = os.environ | {"RUST_LOG": "error", "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if reads_output else subprocess.DEVNULL,
            stderr=None if reads_output else subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.total: CpuTime | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def read_line(self) -> str:
        """A line of its standard output; RuntimeError when it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended without a word")
        return line

    def stop(self) -> None:
        """Ends the process and keeps what wait4 says it spent."""
        if self.total is not None:
            return
        family = psutil.Process(self.pid).children(recursive=True)
        # `Popen` would reap a process that has ended and lose what it spent.
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            pid, _, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                deadline += STOP_TIMEOUT_S
            time.sleep(0.01)
        self._process.returncode = 0
        if self._process.stdout is not None:
            self._process.stdout.close()
        for member in family:
            if member.is_running():
                member.kill()
        self.total = CpuTime(usage.ru_utime, usage.ru_stime)

    def cpu(self) -> CpuTime:
        """What the process and its children have spent."""
        root = psutil.Process(self.pid)
        times = [member.cpu_times() for member in (root, *root.children(recursive=True))]
        return CpuTime(sum(each.user for each in times), sum(each.system for each in times))

    def resident_bytes(self) -> int:
        """Memory it holds now."""
        return psutil.Process(self.pid).memory_info().rss


class Mock(Program):
    """A mock server of the given kind, "worker" or "openai", on `port`."""

    def __init__(self, kind: str, tokenizer: Path, *, step_us: int = 0, max_running: int = 65536) -> None:
        engine = ["--tokenizer", str(tokenizer), "--step-us", str(step_us), "--max-running", str(max_running)]
        super().__init__([mock_binary(), kind, *engine], reads_output=True)
        self.port: int = json.loads(self.read_line())["port"]


class Router(Program):
    """A router on `port`, ready to answer."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        super().__init__(command)
        self.port = port

    def ready(self) -> Self:
        """Waits until it answers a chat request. RuntimeError when it does not."""
        body = {"model": "micro", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        deadline = time.monotonic() + START_TIMEOUT_S
        url, last = f"http://127.0.0.1:{self.port}/v1/chat/completions", ""
        while time.monotonic() < deadline:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"the router ended at once: {self._process.args!r}")
            try:
                reply = httpx.post(url, json=body, timeout=10)
            except httpx.TransportError as error:
                last = str(error)
            else:
                if reply.status_code == 200:
                    return self
                last = reply.text
            time.sleep(0.1)
        raise RuntimeError(f"the router does not answer: {last[:300]}")

    def num_active(self) -> int:
        """Requests in progress, by the gateway's own count."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30).text
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("baleen_active_requests "))

    def answered(self, **load: Any) -> tuple[dict[str, Any], CpuTime]:
        """Puts a load on it; returns what the client saw and what the router spent."""
        before = self.cpu()
        seen = put_load(self.port, **load)
        return seen, self.cpu() - before


def put_load(port: int, **options: Any) -> dict[str, Any]:
    """Runs the client of the mock crate against `port` and returns its report."""
    return report_of(start_load(port, **options))


def start_load(port: int, **options: Any) -> subprocess.Popen[str]:
    """Starts the client, for measurements that look at the router meanwhile."""
    command = [mock_binary(), "load", "--port", str(port)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def report_of(load: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a client and returns its report. RuntimeError when it failed."""
    output, _ = load.communicate()
    if load.returncode != 0:
        raise RuntimeError(f"the load failed: {load.args!r}")
    report: dict[str, Any] = json.loads(output)
    return report | report.pop("result")


def mock_binary() -> str:
    """The built program of bench/mock; see `build_mock`."""
    return str(target_folder() / "ci" / "bench-mock")


def build_mock() -> None:
    """Compiles it, as optimised as the gateway that `make setup` builds."""
    command = ["cargo", "build", "--quiet", "--locked", "--profile", "ci", "--package", "baleen-bench-mock"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"CARGO_TARGET_DIR": str(target_folder())}, check=True)


def target_folder() -> Path:
    """Where `make` has cargo build."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")


def allow_many_files() -> None:
    """Raises the limit on open files as far as this user may; children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < 11_000:
        print(f"warning: only {most} open files are allowed, so ten thousand streams will not open", file=sys.stderr)
