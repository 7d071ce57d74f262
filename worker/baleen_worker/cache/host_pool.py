"""The bytes of the host tier: a place in host memory for each of its pages, and the copies that plans ask for.

Owns those tensors and, on a GPU, the stream on which they are copied. `cache.host` decides what is copied; `PagedPools`
asks `wait` before it touches a layer, so a layer is computed as soon as its own pages have come, while those of later
layers are still on their way. On a CPU a copy is done when `copy` returns.

Legend: H host pages, B bytes of a page in one layer and store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baleen_worker.step import CopyError, PageCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baleen_worker.cache.storage import KvLayout, PagedPools
    from baleen_worker.step import Runner, StepHandle, StepPlan


class HostPool:
    """[H, B] uint8 for every store of every layer, pinned where a GPU reads it."""

    def __init__(self, pools: PagedPools, num_pages: int, *, by_layer: bool = True) -> None:
        """`by_layer` False: all layers wait for all copies, as steps must that run as one CUDA graph.

        ValueError when the host does not have the memory.
        """
        self._layers = [pools.page_stores(layer) for layer in range(pools.layout.num_layers)]
        self._device = self._layers[0][0].device
        on_gpu = self._device.type == "cuda"
        try:
            self._host = [
                [torch.empty(num_pages, store.shape[1], dtype=torch.uint8, pin_memory=on_gpu) for store in stores]
                for stores in self._layers
            ]
        except RuntimeError as error:
            gigabytes = num_pages * pools.layout.bytes_per_page / 1e9
            raise ValueError(
                f"the host has no {gigabytes:.1f} GB for its tier of the cache: lower --hicache-size or --hicache-ratio"
            ) from error
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._arrived = [torch.cuda.Event() for _ in self._layers] if on_gpu else []
        self._by_layer = by_layer
        self._under_way = False
        pools.before_access = self.wait

    @torch.inference_mode()
    def copy(self, copies: PageCopies | None) -> None:
        """Begins a plan's copies, each layer's out before back. Call before anything of the plan is computed."""
        self._under_way = False
        if copies is None:
            return
        try:
            self._begin(_runs(copies.out), _runs(copies.back))
        except (RuntimeError, IndexError) as error:
            raise CopyError(str(error)) from error
        self._under_way = self._stream is not None
        if not self._by_layer:
            self.wait_all()

    def wait(self, layer: int) -> None:
        """The current stream goes on when the layer's pages have been copied, and so those of all before it."""
        if self._under_way:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def wait_all(self) -> None:
        """The current stream goes on when all pages have been copied."""
        self.wait(len(self._layers) - 1)
        self._under_way = False

    def _begin(self, out: Sequence[_Run], back: Sequence[_Run]) -> None:
        if self._stream is None:
            for stores, kept in zip(self._layers, self._host, strict=True):
                _copy_layer(stores, kept, out, back)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for stores, kept, arrived in zip(self._layers, self._host, self._arrived, strict=True):
                _copy_layer(stores, kept, out, back)
                arrived.record()


class CopyingRunner:
    """A `Runner` that makes a plan's copies before it lets another one compute the plan."""

    def __init__(self, inner: Runner, pool: HostPool, poison: Callable[[Sequence[int]], None]) -> None:
        """`poison` spoils pages at once."""
        self._inner = inner
        self._pool = pool
        self._poison = poison
        self._freed: list[int] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner`."""
        copies = plan.copies
        if self._freed:
            self._pool.copy(None if copies is None else PageCopies(copies.out, ()))
            self._pool.wait_all()
            self._poison(self._freed)
            self._freed = []
            copies = None if copies is None else PageCopies((), copies.back)
        self._pool.copy(copies)
        return self._inner.launch(plan)

    def poison(self, pages: Sequence[int]) -> None:
        """The pages are free, but may yet go to the host: they are spoilt once the next plan's copies out are made."""
        self._freed += pages


def host_pages(layout: KvLayout, num_device_pages: int, *, ratio: float, size_gb: float | None) -> int:
    """Pages of the tier, the device having `num_device_pages` that requests can hold. ValueError when it has none."""
    pages = int(ratio * num_device_pages) if size_gb is None else int(size_gb * 1e9) // layout.bytes_per_page
    if pages < 1:
        raise ValueError(
            f"the host tier has no room for a page of {layout.bytes_per_page:,} bytes: raise --hicache-size or "
            "--hicache-ratio, or leave --enable-hierarchical-cache out"
        )
    return pages


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` consecutive pages, to as many consecutive places."""

    source: int
    target: int
    count: int


def _runs(pairs: Sequence[tuple[int, int]]) -> list[_Run]:
    """Pairs that continue each other become one copy; pages that were granted together mostly do."""
    runs: list[_Run] = []
    for source, target in sorted(pairs):
        last = runs[-1] if runs else None
        if last is not None and (source, target) == (last.source + last.count, last.target + last.count):
            runs[-1] = _Run(last.source, last.target, last.count + 1)
        else:
            runs.append(_Run(source, target, 1))
    return runs


def _copy_layer(stores: Sequence[Tensor], kept: Sequence[Tensor], out: Sequence[_Run], back: Sequence[_Run]) -> None:
    for on_device, on_host in zip(stores, kept, strict=True):
        for run in out:
            _move(on_device, on_host, run)
        for run in back:
            _move(on_host, on_device, run)


def _move(source: Tensor, target: Tensor, run: _Run) -> None:
    """Of slices, one past the end would be empty and copied without a word."""
    kept = source.narrow(0, run.source, run.count)
    target.narrow(0, run.target, run.count).copy_(kept, non_blocking=True)
