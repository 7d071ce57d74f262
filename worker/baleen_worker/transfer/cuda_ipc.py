"""Pages between two GPUs of one host: the peer's pools are mapped into this process, and its own device reads them.

Handles name allocations, not stores, so each store is lent as a handle and an offset in it. A mapping outlives the
process that lent it. Needs no library beyond those that PyTorch for CUDA brings.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.step import DevicePages, PageStore, Region
from baleen_worker.transfer.lending import Backend, Borrowed, LoanError, check_regions

_HANDLE_BYTES = 64


class _Store(msgspec.Struct, frozen=True, array_like=True):
    handle: int  # number in `_Lent.handles`
    offset: int
    page_bytes: int


class _Lent(msgspec.Struct, frozen=True, array_like=True):
    """`handles` with the bytes of the allocation behind each."""

    num_pages: int
    handles: list[tuple[bytes, int]]
    stores: list[_Store]


_decoder: msgspec.msgpack.Decoder[_Lent] = msgspec.msgpack.Decoder(_Lent)


class CudaIpc:
    """The `Lender` of a rank whose pools are on a GPU. Raises LoanError where they are not."""

    kind = Backend.CUDA_IPC
    start_s = 0.0

    def __init__(self, store: PageStore) -> None:
        """Handles are made at once, so that it is known from the start when memory cannot be lent."""
        if store.device is None:
            raise LoanError("the pages are in host memory, and not on a GPU")
        self._store, self._device, self._index = store, store.device, store.device.index
        self._runtime, self._driver = _bindings()
        self._lent = self._make_handles()

    def lend(self) -> bytes:
        """See `Lender`."""
        return self._lent

    def borrow(self, lent: bytes) -> Borrowed:
        """See `Lender`."""
        try:
            memory = _decoder.decode(lent)
        except msgspec.DecodeError as error:
            raise LoanError(f"what it lends is no memory: {error}") from None
        self._check_lent(memory)
        opened: list[int] = []
        try:
            self._call(self._runtime.cudaSetDevice, self._index)
            for handle, _ in memory.handles:
                opened.append(self._open(handle))
        except LoanError:
            self._close(opened)
            raise
        addresses = [opened[store.handle] + store.offset for store in memory.stores]
        return _Mapped(self, self._device, memory.num_pages, opened, addresses)

    def close_all(self, opened: Iterable[int]) -> None:
        """Unmaps memory that was borrowed."""
        self._close(opened)

    def _make_handles(self) -> bytes:
        self._call(self._runtime.cudaSetDevice, self._index)
        handles: list[tuple[bytes, int]] = []
        numbers: dict[int, int] = {}
        stores: list[_Store] = []
        for region in self._store.regions:
            base, num_bytes = self._call(self._driver.cuMemGetAddressRange, region.address)
            base = int(base)
            if base not in numbers:
                numbers[base] = len(handles)
                handle = self._call(self._runtime.cudaIpcGetMemHandle, base)
                handles.append((ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), int(num_bytes)))
            stores.append(_Store(numbers[base], region.address - base, region.page_bytes))
        return msgspec.msgpack.encode(_Lent(self._store.num_pages, handles, stores))

    def _check_lent(self, memory: _Lent) -> None:
        """A read outside of what is mapped would cost the device all its work."""
        check_regions(self._store.regions, [Region(0, store.page_bytes) for store in memory.stores])
        for store in memory.stores:
            if not 0 <= store.handle < len(memory.handles) or store.offset < 0 or store.offset % 16:
                raise LoanError("what it lends is no memory: a store lies outside of it")
            if len(memory.handles[store.handle][0]) != _HANDLE_BYTES:
                raise LoanError("what it lends is no memory: a handle has another length")
            if store.offset + memory.num_pages * store.page_bytes > memory.handles[store.handle][1]:
                raise LoanError("what it lends is no memory: its pages exceed it")

    def _open(self, handle: bytes) -> int:
        made = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(made.getPtr(), handle, _HANDLE_BYTES)
        [address] = self._call(
            self._runtime.cudaIpcOpenMemHandle, made, self._runtime.cudaIpcMemLazyEnablePeerAccess, single=False
        )
        return int(address)

    def _close(self, opened: Iterable[int]) -> None:
        self._runtime.cudaSetDevice(self._index)
        for address in opened:
            self._runtime.cudaIpcCloseMemHandle(address)

    def _call(self, function: Any, *arguments: Any, single: bool = True) -> Any:
        """What it returns besides its status. Raises LoanError with CUDA's own words."""
        status, *results = function(*arguments)
        if int(status):
            raise LoanError(f"{function.__name__} says {status.name}: {_HINTS.get(status.name, _HINT)}")
        return results[0] if single and len(results) == 1 else results


class _Mapped:
    """The pools of one peer."""

    def __init__(
        self, owner: CudaIpc, device: DevicePages, num_pages: int, opened: Sequence[int], addresses: Sequence[int]
    ) -> None:
        self.num_pages = num_pages
        self._owner = owner
        self._device = device
        self._opened = opened
        self._addresses = addresses

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        """See `Borrowed`."""
        return self._device.fill(self._addresses, theirs, ours)

    def touch(self) -> Callable[[], object]:
        """See `Borrowed`. The sink pages are of nobody."""
        return self._device.fill(self._addresses, [SINK_PAGE], [SINK_PAGE])

    def close(self) -> None:
        """See `Borrowed`."""
        self._owner.close_all(self._opened)


_HINT = "both workers must be on one host, in one namespace of processes, with pools from the default allocator"
_HINTS = {
    "cudaErrorPeerAccessUnsupported": "the two GPUs cannot read each other's memory: name tcp as the transfer backend",
    "cudaErrorMapBufferObjectFailed": _HINT,
    "cudaErrorInvalidResourceHandle": _HINT,
}


def _bindings() -> tuple[Any, Any]:
    """The runtime's functions and the driver's."""
    try:
        return importlib.import_module("cuda.bindings.runtime"), importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise LoanError(
            "the Python package cuda-bindings is missing: install PyTorch for CUDA, or pip install cuda-bindings"
        ) from None
