"""A gateway with several workers, each behind a proxy that can break its link. Parts can be killed and come back.

Ports are fixed for the life of a stack: what is started again has the address that it had before, as behind a service
name, and whoever still speaks to the one before it must notice.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import psutil
from chaos.clock import Clock
from chaos.proxy import FaultProxy
from chaos.trap import FOLDER_VARIABLE, Trap
from harness.processes import GATEWAY_BINARY, MICRO_MODEL, ROOT, Process, free_port, is_alive
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from chaos.crowd import Crowd

START_TIMEOUT_S = 60.0
REST_TIMEOUT_S = 40.0
DEADLY_TOKEN_ID = 2  # nobody else's prompts have it
WORKER_FLAGS = (
    "--runner fake --fake-step-ms 12 --poison-freed-pages --max-total-tokens 16384 --max-running-requests 16"
    f" --fake-deadly-token-id {DEADLY_TOKEN_ID}"
)
# What must be nothing once nobody asks.
HELD = (
    "baleen_active_requests",
    "baleen_queued_requests",
    "baleen_worker_running_requests",
    "baleen_worker_waiting_requests",
    "baleen_worker_used_kv_pages",
)
READY = "baleen_worker_ready"
# Whatever is written there fails as on a disk without room.
NO_ROOM = Path("/dev/full")
# Roles of the workers of a stack.
ALIKE = ("unified",) * 3
PAIRS = ("prefill", "prefill", "decode", "decode")


class Member:
    """A worker, the proxy before it, the one before its pages if others read them, its clock, and the trap in it."""

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.port, self.metrics_port = free_port(), free_port()
        self.proxy = FaultProxy(self.port)
        self.pages = FaultProxy(free_port()) if role == "prefill" else None
        self.process: Process | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="baleen-trap-")
        self.trap = Trap(Path(self._folder.name))
        self.clock = Clock()

    @property
    def proxies(self) -> list[FaultProxy]:
        return [self.proxy] if self.pages is None else [self.proxy, self.pages]

    def start(self, output: Path | None = None) -> None:
        """Starts the worker, again or for the first time. `output`: where it prints, in place of its log."""
        self.stop()
        command = [sys.executable, "-m", "chaos.worker", str(MICRO_MODEL), *WORKER_FLAGS.split()]
        if self.role != "unified":
            command += ["--disaggregation-mode", self.role]
        if self.pages is not None:
            command += ["--disaggregation-bootstrap-port", str(self.pages.target)]
            command += ["--disaggregation-advertise-address", f"127.0.0.1:{self.pages.port}"]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        self.trap.clear()
        environment = {FOLDER_VARIABLE: self._folder.name, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'worker'}"}
        self.process = Process(command, env=environment | self.clock.environment, output=output)

    def stop(self) -> None:
        """Ends what is left of it, whatever state it is in."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def close(self) -> None:
        """Ends it for good, and its trap and clock."""
        self.stop()
        self.clock.close()
        self._folder.cleanup()

    def signal(self, number: int, *, rank_only: bool = False) -> None:
        """Signals every process of the worker, or the one that computes."""
        assert self.process is not None
        if rank_only:
            for child in psutil.Process(self.process.pid).children():
                child.send_signal(number)
        else:
            self.process.signal_group(number)

    def is_ready(self) -> bool:
        """Whether it has said so. AssertionError when it has ended."""
        assert self.process is not None
        self.process.require_running()
        return " ready: " in self.process.log()

    def is_alive(self) -> bool:
        return self.process is not None and is_alive(psutil.Process(self.process.pid))


class Stack:
    """The whole of it. Use as an asynchronous context manager."""

    def __init__(self, roles: Sequence[str] = ALIKE) -> None:
        self.roles = tuple(roles)
        self.members = [Member(f"{role} {number}", role) for number, role in enumerate(roles)]
        self.port = free_port()
        self.gateway: Process | None = None
        self.clock = Clock()  # the gateway's
        self.crowd: Crowd  # that of the schedule which runs
        self._running = AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        try:
            self._running.callback(self.clock.close)
            for member in self.members:
                for proxy in member.proxies:
                    await self._running.enter_async_context(proxy)
                self._running.callback(member.close)
                member.start()
            self.start_gateway()
            self._running.callback(self.stop_gateway)
            await self.all_ready(START_TIMEOUT_S)
        except BaseException:
            await self._running.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    def start_gateway(self, output: Path | None = None) -> None:
        """`output`: where it prints, in place of its log."""
        workers: list[str] = []
        for member in self.members:
            flag = "--worker" if member.role == "unified" else f"--{member.role}"
            workers += [flag, f"127.0.0.1:{member.proxy.port}"]
        command = [str(GATEWAY_BINARY), *workers, "--port", str(self.port), "--log-level", "warn"]
        self.gateway = Process(command, env=self.clock.environment, output=output)

    def stop_gateway(self) -> None:
        if self.gateway is not None:
            self.gateway.close()
            self.gateway = None

    async def renew_gateway(self) -> None:
        """Starts another one, which holds nothing against workers that an earlier schedule has broken."""
        self.stop_gateway()
        self.start_gateway()
        await self.all_ready(START_TIMEOUT_S)

    def kill_gateway(self) -> None:
        assert self.gateway is not None
        self.gateway.signal_group(signal.SIGKILL)

    async def metrics(self) -> dict[str, float]:
        """The gateway's, summed over labels; nothing when it does not answer."""
        return await _scrape(f"{self.url}/metrics")

    async def counted(self, counter: str) -> dict[str, float]:
        """What each worker has counted of this, in this life of it."""
        name = f"baleen_worker_{counter}_total"
        found = [await _scrape(f"http://127.0.0.1:{member.metrics_port}/metrics") for member in self.members]
        return {member.name: samples.get(name, 0.0) for member, samples in zip(self.members, found, strict=True)}

    async def all_ready(self, timeout_s: float) -> None:
        """Waits until every worker serves and requests have a way; TimeoutError with the logs when one does not."""
        try:
            async with asyncio.timeout(timeout_s):
                while (await self.metrics()).get(READY) != len(self.members) or not await self._takes_requests():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            assert self.gateway is not None
            raise TimeoutError(f"not every worker is ready after {timeout_s:g} s:\n{self.gateway.log()}") from None

    async def _takes_requests(self) -> bool:
        """Whether the gateway says so: workers that share requests are tried before they get any."""
        try:
            async with httpx.AsyncClient(timeout=5) as http:
                return (await http.get(f"{self.url}/readyz")).is_success
        except httpx.HTTPError:
            return False

    async def at_rest(self) -> dict[str, float]:
        """What is still held once all has had time to be given back; all zero as it should be."""
        held: dict[str, float] = {}
        for _ in range(int(REST_TIMEOUT_S / 0.25)):
            metrics = await self.metrics()
            held = {name: metrics.get(name, -1.0) for name in HELD}
            if not any(held.values()):
                break
            await asyncio.sleep(0.25)
        return held


async def _scrape(url: str) -> dict[str, float]:
    """Metrics, summed over labels; nothing when nobody answers."""
    try:
        async with httpx.AsyncClient(timeout=5) as http:
            text = (await http.get(url)).raise_for_status().text
    except httpx.HTTPError:
        return {}
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


# Breaks something of a stack, as the seed has it.
Strike = Callable[[Stack, random.Random], Awaitable[None]]
