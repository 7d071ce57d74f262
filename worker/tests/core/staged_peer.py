"""One side of transfers by couriers, in this process or in one of its own that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from baleen_worker.step import DevicePages, Region
from baleen_worker.transfer.actions import Begun, Report, Timers
from baleen_worker.transfer.couriers import Couriers
from baleen_worker.transfer.lending import Backend
from baleen_worker.transfer.messages import Final, Key
from baleen_worker.transfer.orders import (
    Expect,
    Finish,
    LegNews,
    Offer,
    Open,
    Peer,
    Probe,
    ProbeEnded,
    Receive,
    Withdraw,
)
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.tcp import TcpTransfer
from baleen_worker.transfer.wire import Identity
from numpy.typing import NDArray

NUM_PAGES = 64
PAGE_BYTES = 256 << 10
PREFILL, DECODE = Identity("staged", 77), Identity("staged", 78)
TIMERS = Timers(8.0, 12.0)
_numbers = count()


class Pool:
    """The `PageStore`: bytes in host memory that follow from a seed."""

    page_bytes = PAGE_BYTES
    num_pages = NUM_PAGES
    regions: Sequence[Region] = ()
    device: DevicePages | None = None

    def __init__(self, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE_BYTES), np.uint8)

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """None: all goes through staging memory."""
        del pages
        return []

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        into[:] = self.bytes[[*pages]].reshape(-1).data

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        self.bytes[[*pages]] = np.frombuffer(data, np.uint8).reshape(len(pages), PAGE_BYTES)


class Side:
    """One rank's transfer."""

    def __init__(self, seed: int, program: Sequence[str], *, listens: bool) -> None:
        self.pool = Pool(seed)
        self.generations = [1] * NUM_PAGES
        self.transfer = TcpTransfer(
            self.pool,
            self.generations.__getitem__,
            PREFILL if listens else DECODE,
            TIMERS,
            vocab_size=10,
            listen=("127.0.0.1", 0) if listens else None,
            reading=Reading(Backend.NIXL, Couriers("lo", program)),
        )
        self.told: dict[Key, list[Report]] = {}
        self.tried: list[ProbeEnded] = []

    # --- a prefill worker

    def offer(self, key: Key, pages: Sequence[int]) -> None:
        """A whole prompt."""
        self.transfer.give([Open(key), self._announced(key, pages), Finish(key, Final(1, 0, len(pages)))])

    def offer_again(self, key: Key, pages: Sequence[int]) -> None:
        """The same after a preemption."""
        self.transfer.give([Withdraw(key), self._announced(key, pages)])

    def grant(self, page: int) -> None:
        """To somebody else."""
        self.generations[page] += 1

    def spoil(self, page: int) -> None:
        """As a fault of memory would."""
        self.pool.bytes[page, 1000] ^= 1

    def counters(self) -> tuple[int, int]:
        """Pages sent, stale reads."""
        return self.transfer.counters.num_pages_sent, self.transfer.counters.num_stale_reads

    def address(self) -> str | None:
        """Where it listens."""
        return self.transfer.address

    def _announced(self, key: Key, pages: Sequence[int]) -> Offer:
        return Offer(key, 0, pages, [self.generations[page] for page in pages])

    # --- a decode worker

    def expect(self, address: str, num_pages: int, key: Key | None = None) -> Key:
        """A leg, once it is announced."""
        key = key or new_key()
        self.transfer.give([Expect(key, Peer(address, PREFILL.boot_epoch, 0), num_pages, 0)])
        self.wait_for(key, Begun)
        return key

    def receive(self, key: Key, pages: Sequence[int]) -> None:
        """Reads it."""
        self.transfer.give([Receive(key, 0, pages)])

    def probe(self, address: str) -> str | None:
        self.tried.clear()
        self.transfer.give([Probe(0, Peer(address, PREFILL.boot_epoch, 0))])
        self.wait(lambda: bool(self.tried))
        return self.tried[0].failure

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            for news in self.transfer.take():
                if isinstance(news, LegNews):
                    self.told.setdefault(news.key, []).append(news.report)
                else:
                    self.tried.append(news)
            if condition():
                return
            assert time.monotonic() < deadline_s, f"still waiting; told so far: {self.told}"
            self.transfer.wait(0.05)

    def wait_for(self, key: Key, kind: type[Report]) -> Report:
        def told() -> list[Report]:
            return [report for report in self.told.get(key, []) if isinstance(report, kind)]

        self.wait(lambda: bool(told()))
        return told()[0]


def new_key() -> Key:
    """Of a leg that nobody had."""
    return f"{os.getpid()}-{next(_numbers)}".encode().rjust(16), 0


class SideProcess:
    """A side in a process of its own, from outside."""

    def __init__(self, seed: int, program: Sequence[str], *, listens: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, seed, program, listens), daemon=True)
        self.process.start()
        theirs.close()
        self.address = self._pipe.recv()

    def ask(self, what: str, *arguments: Any) -> Any:
        """One of `Side`'s methods."""
        self.tell(what, *arguments)
        return self._pipe.recv()

    def tell(self, what: str, *arguments: Any) -> None:
        """The same, without waiting for its end."""
        self._pipe.send((what, arguments))

    def couriers(self) -> list[psutil.Process]:
        return couriers_of(self.process.pid)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None, "it never started"
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """In whatever state it is."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._pipe.close()


def couriers_of(pid: int | None) -> list[psutil.Process]:
    """Those that run."""
    children = psutil.Process(pid).children()
    return [child for child in children if any("nixl_process" in word or "stand_in" in word for word in _words(child))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _run(pipe: Connection, seed: int, program: Sequence[str], listens: bool) -> None:
    side = Side(seed, program, listens=listens)
    pipe.send(side.transfer.address)
    while True:
        what, arguments = pipe.recv()
        pipe.send(getattr(side, what)(*arguments))
