"""A prefill worker's memory and transfer in a process of its own, on a GPU, done with as its parent says.

The pools' contents follow from a seed, so that the parent can tell what must have come.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from baleen_worker.cache.page_bytes import PoolPages
from baleen_worker.cache.storage import BFLOAT16, FP8, KvLayout, PagedPools
from baleen_worker.transfer.actions import HandedOver, Timers
from baleen_worker.transfer.cuda_ipc import CudaIpc
from baleen_worker.transfer.lending import Backend
from baleen_worker.transfer.messages import Final
from baleen_worker.transfer.orders import Finish, LegNews, Offer, Open, Order, Withdraw
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.tcp import TcpTransfer
from baleen_worker.transfer.wire import Identity

PREFILL, DECODE = Identity("cuda", 1), Identity("cuda", 2)
TIMERS = Timers(10.0, 20.0)
_MATRIX = 4096
SWITCH_S = 0.0005  # as in a rank


def make_layout(num_layers: int, latent_format: str) -> KvLayout:
    """The released model's widths; index keys on all layers but the second."""
    assert latent_format in (FP8, BFLOAT16)
    own = tuple(layer != 1 for layer in range(num_layers))
    return KvLayout(num_layers, own, 512, 64, 128, latent_format, FP8, index_hadamard=True, model_digest="0" * 64)


def make_pools(layout: KvLayout, num_pages: int, device: torch.device) -> PagedPools:
    """Pools on a device."""
    return PagedPools(layout, num_pages, device=device, dtype=torch.bfloat16)


def contents(layer: int, number: int, like: torch.Tensor) -> torch.Tensor:
    """What the prefill side's store has in all pages: different in each word, quick to make anywhere."""
    words = torch.arange(like.numel() // 8, device=like.device, dtype=torch.int64)
    mixed = (words + (layer * 1000 + number + 1) * 0x1234567) * 0x2545F4914F6CDD1D
    return (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)).view(torch.uint8).view_as(like)


class PrefillProcess:
    """The parent's end."""

    def __init__(self, layout: KvLayout, num_pages: int, visible: str, backend: Backend = Backend.CUDA_IPC) -> None:
        """`visible`: the GPU, as CUDA_VISIBLE_DEVICES has it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, layout, num_pages, visible, backend), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._pipe.recv()

    def __enter__(self) -> PrefillProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, what: str, *arguments: Any) -> Any:
        """One of `_Prefill`'s methods."""
        self.start(what, *arguments)
        return self.answer()

    def start(self, what: str, *arguments: Any) -> None:
        """The same; `answer` waits for it."""
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        """What the method returned that was started."""
        return self._pipe.recv()

    def kill(self) -> None:
        """As a fault would."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class _Prefill:
    def __init__(self, layout: KvLayout, num_pages: int, backend: Backend) -> None:
        self.device = torch.device("cuda", 0)
        self.pools = make_pools(layout, num_pages, self.device)
        for layer in range(layout.num_layers):
            for number, store in enumerate(self.pools.page_stores(layer)):
                store.copy_(contents(layer, number, store))
        torch.cuda.synchronize()
        self.store = PoolPages(self.pools)
        self.generations = [1] * num_pages
        reading = Reading(backend, None if backend is Backend.TCP else CudaIpc(self.store))
        self.transfer = TcpTransfer(
            self.store,
            self.generations.__getitem__,
            PREFILL,
            TIMERS,
            vocab_size=10,
            listen=("127.0.0.1", 0),
            reading=reading,
        )
        self._matrix = torch.randn(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16)

    def offer(self, key: bytes, pages: list[int]) -> None:
        """A whole prompt."""
        generations = [self.generations[page] for page in pages]
        self.transfer.give([Open((key, 0)), Offer((key, 0), 0, pages, generations)])
        self.transfer.give([Finish((key, 0), Final(1, 0, len(pages)))])

    def again(self, key: bytes, pages: list[int]) -> None:
        """The same after a preemption."""
        self.transfer.give([Withdraw((key, 0)), Offer((key, 0), 0, pages, [self.generations[page] for page in pages])])

    def grant(self, page: int) -> None:
        """To somebody else, who writes there."""
        self.generations[page] += 1
        self.pools.poison([page])
        torch.cuda.synchronize()

    def spoil(self, page: int) -> None:
        """As a fault of memory would."""
        self.pools.page_stores(0)[0][page, 100] ^= 1
        torch.cuda.synchronize()

    def prompt(self, key: bytes, pages: list[int], chunk: int, compute_ms: float) -> float:
        """A prompt chunk by chunk, each after so much computing; when the last chunk was done."""
        self.transfer.give([Open((key, 0))])
        last_s = 0.0
        for first in range(0, len(pages), chunk):
            self.compute(compute_ms)
            part = pages[first : first + chunk]
            orders: list[Order] = [Offer((key, 0), first, part, [1] * len(part))]
            if first + chunk >= len(pages):
                orders.append(Finish((key, 0), Final(1, 0, len(pages))))
            last_s = time.monotonic()
            self.transfer.give(orders)
        while not any(
            isinstance(news, LegNews) and isinstance(news.report, HandedOver) for news in self.transfer.take()
        ):
            self.transfer.wait(1.0)
        return last_s

    def compute(self, milliseconds: float) -> None:
        """Keeps the device busy, and waits for it as the engine does."""
        end_s = time.monotonic() + milliseconds / 1000
        while time.monotonic() < end_s:
            for _ in range(8):
                torch.mm(self._matrix, self._matrix)
            torch.cuda.synchronize()

    def lend(self) -> bytes:
        """What its memory is borrowed by."""
        return CudaIpc(self.store).lend()

    def watch(self) -> None:
        """See `transfer_marks`."""
        from transfer_marks import watch

        watch("prefill")

    def choose(self, options: list[str]) -> None:
        """See `transfer_marks`."""
        from transfer_marks import choose

        choose(options)

    def marks(self) -> list[tuple[str, float]]:
        """Since the last time."""
        from transfer_marks import take

        return take()

    def stale_reads(self) -> int:
        """So far."""
        return self.transfer.counters.num_stale_reads


def _run(pipe: Connection, layout: KvLayout, num_pages: int, visible: str, backend: Backend) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    sys.setswitchinterval(SWITCH_S)
    prefill = _Prefill(layout, num_pages, backend)
    pipe.send(prefill.transfer.address)
    while True:
        what, arguments = pipe.recv()
        pipe.send(getattr(prefill, what)(*arguments))
