"""Pages of the pools as bytes, for transfers: in each page layer after layer, latents before index keys.

Owns no memory of pages. Reads and writes go on in a thread beside the engine's: the pages concerned are in no step
meanwhile.

Legend: N pages, B bytes of a page in all layers and stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baleen_worker.step import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from baleen_worker.cache.storage import PagedPools
    from baleen_worker.step import DevicePages


class PoolPages:
    """The `PageStore` of one rank's pools."""

    def __init__(self, pools: PagedPools) -> None:
        stores = [store for layer in range(pools.layout.num_layers) for store in pools.page_stores(layer)]
        self.num_pages = pools.num_pages
        self.page_bytes = sum(store.shape[1] for store in stores)
        self.regions: Sequence[Region] = [Region(store.data_ptr(), store.shape[1]) for store in stores]
        ends = np.cumsum([store.shape[1] for store in stores]).tolist()
        columns = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._on_device = [*zip(stores, columns, strict=True)] if stores[0].is_cuda else None
        self._device: DevicePages | None = None
        # A copy of a few KiB costs numpy a tenth of what it costs PyTorch, which also wakes its threads for it.
        self._on_host = [] if stores[0].is_cuda else [*zip((store.numpy() for store in stores), columns, strict=True)]

    @property
    def device(self) -> DevicePages | None:
        """See `PageStore`. Made when it is first asked for, which a worker that serves alone never does."""
        if self._device is None and self._on_device is not None:
            from baleen_worker.cache.device_pages import DevicePoolPages

            self._device = DevicePoolPages([store for store, _ in self._on_device])
        return self._device

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """See `PageStore`; none of pages on a device."""
        runs = _runs(pages)
        return [store[first : first + end - start] for store, _ in self._on_host for first, start, end in runs]

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        """Copies pages out, into [N, B]."""
        staged = np.frombuffer(into, np.uint8).reshape(len(pages), self.page_bytes)
        if self._on_device is not None:
            self._copy_on_device(pages, staged, self._on_device, out=True)
            return
        for first, start, end in _runs(pages):
            for store, column in self._on_host:
                staged[start:end, column] = store[first : first + end - start]

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """Inverse of `read`."""
        staged = np.frombuffer(data, np.uint8).reshape(len(pages), self.page_bytes)
        if self._on_device is not None:
            self._copy_on_device(pages, staged, self._on_device, out=False)
            return
        for first, start, end in _runs(pages):
            for store, column in self._on_host:
                store[first : first + end - start] = staged[start:end, column]

    @torch.inference_mode()
    def _copy_on_device(
        self, pages: Sequence[int], staged: NDArray[np.uint8], stores: Sequence[tuple[Tensor, slice]], *, out: bool
    ) -> None:
        host = torch.from_numpy(staged)
        for first, start, end in _runs(pages):
            for store, column in stores:
                held, moved = store.narrow(0, first, end - start), host[start:end, column]
                if out:
                    moved.copy_(held)
                else:
                    held.copy_(moved)
        torch.cuda.synchronize(stores[0][0].device)  # steps run on another stream


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of consecutive page numbers, which pages granted together mostly are: first page, range of places."""
    breaks = [at for at in range(1, len(pages)) if pages[at] != pages[at - 1] + 1]
    return [(pages[start], start, end) for start, end in zip([0, *breaks], [*breaks, len(pages)], strict=True)]
