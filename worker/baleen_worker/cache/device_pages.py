"""Pages of pools on a device: their digests, and filling them from memory that the device reaches.

Owns a stream beside the engine's, of a higher priority: what it does is short, and another worker waits for it. Whoever
waits for it does so without holding the interpreter.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from baleen_kernels.page_copy import copy_at
from baleen_kernels.page_digest import WORD_BYTES, digests_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

_MASK = (1 << 64) - 1


class DevicePoolPages:
    """The `DevicePages` of one rank's pools."""

    digest = "page_digest"
    max_pages = 512

    def __init__(self, stores: Sequence[Tensor]) -> None:
        """Stores as uint8 [pages, bytes]."""
        self._device = stores[0].device
        self.index = self._device.index
        self._addresses = torch.tensor([store.data_ptr() for store in stores], device=self._device)
        self._words = torch.tensor([store.shape[1] // WORD_BYTES for store in stores], device=self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1)

    def digests(self, pages: Sequence[int]) -> list[int]:
        """See `DevicePages`."""
        with self._beside():
            [numbers] = self._numbers(pages)
            return self._digests(numbers)()

    def fill(self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        """See `DevicePages`."""
        with self._beside():
            [addresses] = self._numbers(sources)
            read, written = self._numbers(theirs, ours)
            copy_at(addresses, read, self._addresses, written, self._words)
            return self._digests(written)

    @contextlib.contextmanager
    def _beside(self) -> Generator[None]:
        """What is launched within runs on the own stream."""
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _digests(self, pages: Tensor) -> Callable[[], list[int]]:
        """Starts; returns what waits."""
        digests = digests_at(self._addresses, self._words, pages)
        host = torch.empty(len(pages), dtype=torch.int64, pin_memory=True).copy_(digests, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[int]:
            done.synchronize()
            return [number & _MASK for number in host.tolist()]

        return wait

    def _numbers(self, *lists: Sequence[int]) -> Tensor:
        """Page numbers and addresses on the device, without waiting for what runs there."""
        return torch.tensor(lists, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
