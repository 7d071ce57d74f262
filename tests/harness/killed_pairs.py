"""A pytest plugin that has every local stack serve pairs of workers, and kills these one after another meanwhile.

    PYTHONPATH=tests python -m pytest -p harness.killed_pairs tests/e2e/test_chat.py

The tests stay as they are. A worker is killed when all are ready: the last victim is back, and no role is without its
other worker. The run fails when no worker was killed.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import httpx
import psutil
import pytest
from harness import processes
from harness.processes import Gateway

PAIRS = ["--prefill-workers", "2", "--decode-workers", "2"]
NUM_WORKERS = 4
PAUSE_S = 0.3

_serve_arguments = processes.serve_arguments
_ready, _close = Gateway.ready, Gateway.close
_killers: list[Killer] = []


class Killer(threading.Thread):
    """Kills the workers of one gateway in turn until told to stop."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(name="killer", daemon=True)
        self.gateway = gateway
        self.num_killed = 0
        self._over = threading.Event()

    def run(self) -> None:
        for turn in itertools.count():
            while not self._all_are_ready():
                if self._over.wait(0.1):
                    return
            victims = heads(self.gateway)
            if len(victims) == NUM_WORKERS:
                victims[turn % NUM_WORKERS].kill()
                self.num_killed += 1
            if self._over.wait(PAUSE_S):
                return

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _all_are_ready(self) -> bool:
        try:
            return self.gateway.metrics()["baleen_worker_ready"] == NUM_WORKERS
        except httpx.HTTPError:
            return False


def heads(gateway: Gateway) -> list[psutil.Process]:
    """First process of each worker that the gateway runs now."""
    found: list[psutil.Process] = []
    for child in psutil.Process(gateway.pid).children():
        try:
            if "--disaggregation-mode" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def serve_arguments(runner: str, *more: str) -> list[str]:
    return _serve_arguments(runner, *more, *PAIRS)


def ready(self: Gateway, timeout_s: float = processes.START_TIMEOUT_S) -> Gateway:
    _ready(self, timeout_s)
    is_new = all(killer.gateway is not self for killer in _killers)
    if is_new and PAIRS[0] in psutil.Process(self.pid).cmdline():
        _killers.append(Killer(self))
        _killers[-1].start()
    return self


def close(self: Gateway) -> None:
    for killer in _killers:
        if killer.gateway is self and killer.is_alive():
            killer.stop()
    _close(self)


def pytest_configure() -> None:
    """Before any test has taken these by name."""
    patched: Any = processes
    patched.serve_arguments = serve_arguments
    patched.Gateway.ready, patched.Gateway.close = ready, close


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not sum(killer.num_killed for killer in _killers) and session.testscollected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"workers killed: {sum(killer.num_killed for killer in _killers)}")
