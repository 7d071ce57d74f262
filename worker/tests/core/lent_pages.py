"""Pages in memory that other processes can map: a stand-in for pools on a GPU, everything above the copy being real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.shared_memory import SharedMemory

import msgspec
import numpy as np
from baleen_worker.step import DevicePages, Region
from baleen_worker.transfer.lending import Backend, LoanError, check_regions
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

NUM_PAGES = 64
SIZES = (10, 690, 300)  # of a page in each store


class SharedPages:
    """The `PageStore`, its `DevicePages` and its `Lender` in one."""

    page_bytes = sum(SIZES)
    num_pages = NUM_PAGES
    digest = "another"
    index = 0
    max_pages = 16
    kind = Backend.CUDA_IPC
    start_s = 0.0

    def __init__(self) -> None:
        self._memory = SharedMemory(create=True, size=NUM_PAGES * self.page_bytes)
        self.generations = [1] * NUM_PAGES
        self.in_place = False
        self.regions: Sequence[Region] = [Region(0, size) for size in SIZES]
        self.device: DevicePages | None = self
        self.num_borrowed = self.num_touched = 0
        self.before_copy: Callable[[Sequence[int]], None] = lambda _: None
        for number in range(NUM_PAGES):
            self.write([number], memoryview(bytes([number]) * self.page_bytes))

    @property
    def pages(self) -> list[bytes]:
        """All contents."""
        return [_page(self._memory, number) for number in range(NUM_PAGES)]

    def spoil(self, page: int, data: bytes) -> None:
        """Somebody writes the page."""
        self.write([page], memoryview(data))

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        del pages
        return []

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        into[:] = b"".join(_page(self._memory, page) for page in pages)

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        for at, page in enumerate(pages):
            _set_page(self._memory, page, bytes(data[at * self.page_bytes :][: self.page_bytes]))

    def digests(self, pages: Sequence[int]) -> list[int]:
        return [xxh3_64_intdigest(_page(self._memory, page), seed=1) for page in pages]

    def fill(self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        raise AssertionError("lent memory is read through what `borrow` returns, not by the device of a stand-in")

    def lend(self) -> bytes:
        return msgspec.msgpack.encode((self._memory.name, [region.page_bytes for region in self.regions]))

    def borrow(self, lent: bytes) -> Mapped:
        name, sizes = msgspec.msgpack.decode(lent, type=tuple[str, list[int]])
        check_regions(self.regions, [Region(0, size) for size in sizes])
        try:
            memory = SharedMemory(name, create=False)
        except FileNotFoundError:
            raise LoanError("its memory is not on this host") from None
        self.num_borrowed += 1
        return Mapped(self, memory)

    def copy_in(self, theirs: SharedMemory, pages: Sequence[int], ours: Sequence[int]) -> None:
        self.before_copy(pages)
        for page, own in zip(pages, ours, strict=True):
            _set_page(self._memory, own, _page(theirs, page))

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()


class Mapped:
    """The `Borrowed` memory of another."""

    num_pages = NUM_PAGES

    def __init__(self, own: SharedPages, memory: SharedMemory) -> None:
        self._own = own
        self._memory = memory

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        def wait() -> list[int]:
            self._own.copy_in(self._memory, theirs, ours)
            return self._own.digests(ours)

        return wait

    def touch(self) -> Callable[[], object]:
        self._own.num_touched += 1
        return lambda: None

    def close(self) -> None:
        self._memory.close()
        self._own.num_borrowed -= 1


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "it is closed"
    return memory.buf


def _page(memory: SharedMemory, number: int) -> bytes:
    pieces: list[bytes] = []
    start = 0
    for size in SIZES:
        pieces.append(bytes(_buffer(memory)[start + number * size :][:size]))
        start += NUM_PAGES * size
    return b"".join(pieces)


def _set_page(memory: SharedMemory, number: int, data: bytes) -> None:
    start = taken = 0
    for size in SIZES:
        _buffer(memory)[start + number * size : start + (number + 1) * size] = data[taken : taken + size]
        start += NUM_PAGES * size
        taken += size
