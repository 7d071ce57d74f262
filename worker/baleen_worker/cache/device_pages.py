"""Pages of pools on a device: their digests, and filling them from memory that the device reaches.

Owns two streams beside the engine's, of a higher priority: what they do is short, and another worker waits for it. All
that a read needs is one graph, captured once: launched one by one, its parts would take longer than the copy. Whoever
waits for the device does so without holding the interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import queue
from typing import TYPE_CHECKING

import torch
from baleen_kernels.own import pages as kernels
from baleen_kernels.page_digest import WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

_MASK = (1 << 64) - 1
# Reads under way at a time; whoever starts one more waits for the first of them.
_NUM_SLOTS = 8
# One is digested while the next is copied, so that only the last part's digest takes time of its own.
_PARTS = 4


class DevicePoolPages:
    """The `DevicePages` of one rank's pools."""

    digest = "page_digest"
    max_pages = 512

    def __init__(self, stores: Sequence[Tensor]) -> None:
        """Stores as uint8 [pages, bytes]."""
        device = stores[0].device
        self.index = device.index
        self._own = [store.data_ptr() for store in stores]
        words = torch.tensor([store.shape[1] // WORD_BYTES for store in stores], device=device)
        addresses = torch.tensor(self._own, device=device)
        streams = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        torch.cuda.synchronize(device)
        with _no_garbage_collected():
            for _ in range(_NUM_SLOTS):
                self._free.put(_Slot(addresses, words, self.max_pages, *streams))

    def digests(self, pages: Sequence[int]) -> list[int]:
        """See `DevicePages`."""
        digests: list[int] = []
        for start in range(0, len(pages), self.max_pages):
            part = pages[start : start + self.max_pages]
            digests += self._start(self._own, part, part, fills=False)()
        return digests

    def fill(self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        """See `DevicePages`."""
        return self._start(sources, theirs, ours, fills=True)

    def _start(
        self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int], *, fills: bool
    ) -> Callable[[], list[int]]:
        slot = self._free.get()
        try:
            slot.start(sources, theirs, ours, fills=fills)
        except BaseException:
            self._free.put(slot)
            raise

        def wait() -> list[int]:
            try:
                return slot.wait()
            finally:
                self._free.put(slot)

        return wait


@contextlib.contextmanager
def _no_garbage_collected() -> Generator[None]:
    """Other graphs and tensors that are freed by this thread would break what it captures."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Slot:
    """One read at a time: its numbers and digests on both sides, and the graphs over them.

    A graph knows addresses and keeps no tensor, so all that it reads or writes is kept here for as long as it is.
    """

    def __init__(
        self, addresses: Tensor, words: Tensor, max_pages: int, stream: torch.cuda.Stream, beside: torch.cuda.Stream
    ) -> None:
        self._max_pages = max_pages
        self._addresses, self._words, self._firsts = addresses, words, words.cumsum(0) - words
        self._stream, self._beside = stream, beside
        size = 1 + len(addresses) + 2 * max_pages
        self._asked = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self._written = self._asked.numpy()
        self._order = torch.zeros(size, dtype=torch.int64, device=addresses.device)
        self._digests = torch.zeros(max_pages, dtype=torch.int64, device=addresses.device)
        self._answer = torch.zeros(max_pages, dtype=torch.int64, pin_memory=True)
        self._done = torch.cuda.Event()
        self._count = 0
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # which has made what is above
        self._graphs = {fills: self._captured(fills=fills) for fills in (False, True)}

    def start(self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int], *, fills: bool) -> None:
        """Launches."""
        assert len(theirs) == len(ours) <= self._max_pages, "more pages than a read may have"
        self._count = count = len(ours)
        first = 1 + len(self._words)
        self._written[0] = count
        self._written[1:first] = sources
        self._written[first : first + count] = theirs
        self._written[first + self._max_pages :][:count] = ours
        with torch.cuda.stream(self._stream):
            self._graphs[fills].replay()
            self._done.record()

    def wait(self) -> list[int]:
        """Until the device is done; the digests."""
        self._done.synchronize()
        return [number & _MASK for number in self._answer[: self._count].tolist()]

    def _captured(self, *, fills: bool) -> torch.cuda.CUDAGraph:
        """A read as a graph. It is run once before, of no page: kernels are compiled when they are launched."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._run(fills=fills)
            self._stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            self._run(fills=fills)
            graph.capture_end()
        return graph

    def _run(self, *, fills: bool) -> None:
        count, sources, theirs, ours = self._order.split([1, len(self._words), self._max_pages, self._max_pages])
        parts = _PARTS if fills else 1
        self._order.copy_(self._asked, non_blocking=True)
        self._digests.zero_()
        for part in range(parts):
            if fills:
                kernels.copy(count, sources, theirs, self._addresses, ours, self._words, part, parts)
            self._beside.wait_stream(self._stream)
            with torch.cuda.stream(self._beside):
                kernels.digest(count, self._addresses, ours, self._words, self._firsts, self._digests, part, parts)
        self._stream.wait_stream(self._beside)
        self._answer.copy_(self._digests, non_blocking=True)
