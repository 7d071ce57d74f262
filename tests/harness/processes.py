"""Starts and stops the real programs for end-to-end tests and measurements.

A process gets its own process group and a log file; leaving its `with` block ends the whole group, whatever happened.
Ports are chosen by the system and read back from the kernel, so that nothing here depends on what is printed.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parents[2]
MICRO_MODEL = ROOT / "models" / "micro"
GATEWAY_BINARY = Path(os.environ.get("BALEEN_GATEWAY", ROOT / ".venv" / "bin" / "gateway"))

# Generous: on a loaded machine everything takes long, and no test is about speed.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0

# Pages for every test, and few enough that a leak is felt.
CAPACITY = ["--max-total-tokens", "65536"]

# What requests hold while they last.
HELD_BY_REQUESTS = (
    "baleen_active_requests",
    "baleen_worker_running_requests",
    "baleen_worker_waiting_requests",
    "baleen_worker_used_kv_pages",
)

# For servers that must come back where they were.
FIXED_PORTS = range(15_000, 32_000)

T = TypeVar("T")


def wait_for(what: str, condition: Callable[[], T], timeout_s: float = START_TIMEOUT_S) -> T:
    """Polls until `condition` gives something true and returns it; TimeoutError names `what` otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"still not so after {timeout_s:.0f} s: {what}")
        time.sleep(0.02)


class Process:
    """A program in its own process group, with its output in a file. Use as a context manager."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        output: Path | None = None,
    ) -> None:
        """`output`: where it prints instead; its log is then empty."""
        self._log = tempfile.NamedTemporaryFile(mode="w+b", suffix=".log")  # noqa: SIM115 - closed in close()
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RUST_LOG")}
        try:
            with (output or Path(self._log.name)).open("ab") as printed:
                self.process = subprocess.Popen(
                    command,
                    cwd=cwd or ROOT,
                    env=clean | {"OMP_NUM_THREADS": "1"} | (env or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError:
            self._log.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(f"--- log of {self.process.args!r}\n{self.log()}---\n")
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """Everything printed so far, standard error included."""
        return Path(self._log.name).read_text("utf-8", errors="replace")

    def family(self) -> list[psutil.Process]:
        """The living processes of the group: this one and whatever it started, orphans included."""
        return [process for process in psutil.process_iter() if _group_of(process) == self.pid and is_alive(process)]

    def listening_port(self) -> int:
        """The TCP port this process itself listens on, once it does."""

        def port() -> int:
            self.require_running()
            try:
                connections = psutil.Process(self.pid).net_connections(kind="tcp")
            except psutil.Error:
                return 0
            return next((c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN), 0)

        return wait_for(f"{self.process.args!r} listens", port)

    def require_running(self) -> None:
        """AssertionError with the log when the process has ended."""
        code = self.process.poll()
        assert code is None, f"{self.process.args!r} exited with {code}:\n{self.log()}"

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Exit code, once the process has ended by itself or by an earlier signal."""
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Signals this process alone."""
        self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Signals every process of the group, as a terminal or a service manager does."""
        os.killpg(self.pid, number)

    def close(self) -> None:
        """Ends the process and all its descendants and forgets the log."""
        family = self.family()
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(STOP_TIMEOUT_S)
        psutil.wait_procs([member for member in family if member.pid != self.pid], timeout=STOP_TIMEOUT_S)
        self._log.close()


class Gateway(Process):
    """A `gateway` on a free port; `serve` and the model come from the arguments."""

    def __init__(
        self,
        *arguments: str,
        binary: Path = GATEWAY_BINARY,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        super().__init__([str(binary), *arguments, "--port", "0"], env=env, cwd=cwd)
        self._port = 0

    @property
    def url(self) -> str:
        if not self._port:
            self._port = self.listening_port()
        return f"http://127.0.0.1:{self._port}"

    def ready(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Waits until the gateway says that it can answer."""
        wait_for("the gateway is ready", self.is_ready, timeout_s)
        return self

    def is_ready(self) -> bool:
        """Whether /readyz answers 200 now. AssertionError when the gateway has exited."""
        self.require_running()
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def client(self) -> openai.OpenAI:
        """The unmodified OpenAI client; it never retries, so that each test sees what the server did."""
        import openai  # measurements do without

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by name, summed over labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    def in_use(self) -> dict[str, float]:
        """What requests hold at this moment, by gauge: permits, places in the engine, pages."""
        metrics = self.metrics()
        return {gauge: metrics[gauge] for gauge in HELD_BY_REQUESTS}

    def wait_until_idle(self) -> None:
        """Waits until requests hold nothing."""
        wait_for("everything is given back", lambda: not any(self.in_use().values()))

    def worker_head(self) -> psutil.Process:
        """The supervised worker's first process."""
        return wait_for("the gateway has a worker", lambda: _worker_children(psutil.Process(self.pid)))[0]

    def worker_rank(self) -> psutil.Process:
        """The process that computes."""
        return wait_for("the worker has a rank", lambda: self.worker_head().children())[0]


class Worker(Process):
    """A worker started by hand, `python -m baleen_worker`, on a free port."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "baleen_worker", *arguments, "--port", "0"]
        super().__init__(command, env=env)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listening_port()}"


def serve_arguments(runner: str, *more: str) -> list[str]:
    """Arguments that serve the micro model by its own computation ("model") or by the fake runner ("fake")."""
    return ["serve", str(MICRO_MODEL), "--runner", runner, *CAPACITY, *more]


def free_port() -> int:
    """A port that nobody listens on now, and that no client is given in passing.

    The system hands out ports from 32768 on to every connection that is made. A server that ends and comes back at its
    port would find it taken now and then.
    """
    for port in random.SystemRandom().sample(FIXED_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection of before may linger there
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"none of 100 ports of {FIXED_PORTS} is free")


def worker_counters(port: int) -> dict[str, float]:
    """What a worker tells of itself at its `--metrics-port`, by name."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).raise_for_status().text.splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def _worker_children(parent: psutil.Process) -> list[psutil.Process]:
    def commands() -> Iterator[psutil.Process]:
        for child in parent.children():
            try:
                if "baleen_worker" in child.cmdline():
                    yield child
            except psutil.NoSuchProcess:
                continue

    return list(commands())
