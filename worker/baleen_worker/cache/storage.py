"""What a KV page contains: two stores per layer, latents and index keys, addressed by the same 64-token pages.

Owns the choice of byte layout, the size of the pools and the tensors themselves. Which pages are free is
`cache.pages`'s business; the arithmetic of packing is `baleen_kernels`'s.

Legend: C width of the latent, R width of the rotary key, D width of an index key, W bytes of a token in one layer.
Latents: [pages * 64, C + R] float32 or bfloat16, or packed FP8 [pages * 64, C + 4 C / 128 + 2 R] bytes (656 for the
released model). Index keys: [pages * 64, D] float32, or packed FP8 [pages, 64 * (D + 4)] bytes, in which all keys of a
page precede all its scales (132 bytes a token). Page 0 is the sink.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from baleen_kernels import index_key_pack, latent_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baleen_worker.model_config import ModelConfig

PAGE_SIZE_TOKENS = index_key_pack.PAGE_SIZE

FLOAT32, BFLOAT16, FP8 = "float32", "bfloat16", "fp8_e4m3"
_PLAIN = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
# Packed scales are powers of two, as the released model rounds its latents and index keys.
_SCALE_UE8M0 = True
# The part of a host's free memory that pools take when nothing else is said.
_HOST_MEMORY_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Formats and sizes of both stores. `index_format` is None where the model has no indexer.

    `index_layers[i]` says whether layer i keeps index keys.
    """

    num_layers: int
    index_layers: tuple[bool, ...]
    latent_dim: int
    rope_dim: int
    index_dim: int
    latent_format: str
    index_format: str | None
    index_hadamard: bool
    model_digest: str

    @property
    def latent_bytes(self) -> int:
        """W of the latent store."""
        if self.latent_format == FP8:
            return latent_pack.fp8_latent_bytes(self.latent_dim, self.rope_dim)
        return _PLAIN[self.latent_format].itemsize * (self.latent_dim + self.rope_dim)

    @property
    def index_bytes(self) -> int:
        """W of the index-key store."""
        if self.index_format is None:
            return 0
        if self.index_format == FP8:
            return index_key_pack.index_page_bytes(self.index_dim) // PAGE_SIZE_TOKENS
        return _PLAIN[self.index_format].itemsize * self.index_dim

    @property
    def bytes_per_token(self) -> int:
        """Both stores, all layers."""
        return self.num_layers * self.latent_bytes + sum(self.index_layers) * self.index_bytes

    @property
    def bytes_per_page(self) -> int:
        """Both stores, all layers."""
        return PAGE_SIZE_TOKENS * self.bytes_per_token

    @property
    def layout_id(self) -> str:
        """Names everything two workers must share before one may read the other's pages."""
        index = "none" if self.index_format is None else f"{self.index_format}:{self.index_bytes}"
        layers = str(self.num_layers)
        if self.index_format is not None and not all(self.index_layers):
            layers += ":" + "".join("F" if owns else "S" for owns in self.index_layers)
        return (
            f"latent={self.latent_format}:{self.latent_bytes};index_k={index};page={PAGE_SIZE_TOKENS};"
            f"layers={layers};hadamard={int(self.index_hadamard)};rope=interleaved;index_rope=half;"
            f"model={self.model_digest[:16]}"
        )


def choose_layout(config: ModelConfig, *, dtype: torch.dtype, kv_cache_dtype: str, index_hadamard: bool) -> KvLayout:
    """The layout for a model computing in `dtype`; `kv_cache_dtype` "auto" stores latents in it.

    Index keys are float32 exactly where latents are. ValueError where a format does not go with the model.
    """
    native = FLOAT32 if dtype == torch.float32 else BFLOAT16
    latent_format = native if kv_cache_dtype == "auto" else kv_cache_dtype
    if native == FLOAT32 and latent_format != FLOAT32:
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype} does not go with --dtype float32, which keeps keys in float32: "
            "leave one of the two out"
        )
    index_format = None
    if config.has_indexer:
        index_format = FLOAT32 if latent_format == FLOAT32 else FP8
    layout = KvLayout(
        num_layers=config.num_hidden_layers,
        index_layers=config.index_layers,
        latent_dim=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        index_dim=config.index_head_dim,
        latent_format=latent_format,
        index_format=index_format,
        index_hadamard=index_hadamard and config.has_indexer,
        model_digest=config.config_digest,
    )
    assert layout.bytes_per_token > 0  # the packed formats raise ValueError for widths that they cannot hold
    return layout


class PagedPools:
    """The tensors. Implements `KvPools` of the model: what is read back is what the layout kept."""

    def __init__(self, layout: KvLayout, num_pages: int, *, device: torch.device, dtype: torch.dtype) -> None:
        """`num_pages` counts the sink; `dtype` is the one that reads return."""
        self.layout = layout
        self.num_pages = num_pages
        # Told of a layer before it is read or written: pages of it may still be on their way from the host.
        self.before_access: Callable[[int], None] = _ignore
        self._dtype = dtype
        num_slots = num_pages * PAGE_SIZE_TOKENS
        if layout.latent_format == FP8:
            shape, stored = [num_slots, layout.latent_bytes], torch.uint8
        else:
            shape, stored = [num_slots, layout.latent_dim + layout.rope_dim], _PLAIN[layout.latent_format]
        self._latents = _zeros(layout.num_layers, shape, stored, device)
        if layout.index_format is None:
            self._index_keys: dict[int, Tensor] = {}
            return
        if layout.index_format == FP8:
            shape, stored = [num_pages, index_key_pack.index_page_bytes(layout.index_dim)], torch.uint8
        else:
            shape, stored = [num_slots, layout.index_dim], _PLAIN[layout.index_format]
        own = [layer for layer, owns in enumerate(layout.index_layers) if owns]
        self._index_keys = dict(zip(own, _zeros(len(own), shape, stored, device), strict=True))

    @property
    def num_bytes(self) -> int:
        """Size of the pools, the sink included."""
        return self.num_pages * self.layout.bytes_per_page

    def page_stores(self, layer: int) -> list[Tensor]:
        """A layer's stores as uint8 [pages, bytes]: latents, and index keys where there are any. Views, not copies."""
        stores = [self._latents[layer]] + ([self._index_keys[layer]] if layer in self._index_keys else [])
        return [store.view(self.num_pages, -1).view(torch.uint8) for store in stores]

    def latent_store(self, layer: int) -> Tensor:
        """The tensor behind a layer's latents, [slots, C + R] or [slots, bytes] uint8, for ops that work in place."""
        self.before_access(layer)
        return self._latents[layer]

    def index_store(self, layer: int) -> Tensor:
        """The tensor behind a layer's index keys, [pages, bytes] uint8 where they are FP8."""
        self.before_access(layer)
        return self._index_keys[layer]

    def page_bytes(self, layer: int, page: int) -> tuple[Tensor, Tensor | None]:
        """The bytes of one page in one layer, as uint8 views: latents, and index keys where there are any."""
        latents = self._latents[layer].view(self.num_pages, -1)[page].view(torch.uint8)
        if layer not in self._index_keys:
            return latents, None
        return latents, self._index_keys[layer].view(self.num_pages, -1)[page].view(torch.uint8)

    def poison(self, pages: Sequence[int]) -> None:
        """Makes everything in the pages not a number, in all layers: whoever still reads one will show it.

        A byte of all ones is part of a NaN in float32, in bfloat16 and in e4m3, values and scales alike.
        """
        numbers = torch.tensor(pages, device=self._latents[0].device)
        for store in (*self._latents, *self._index_keys.values()):
            store.view(self.num_pages, -1).view(torch.uint8)[numbers] = 0xFF

    def write_latent(self, layer: int, kv_slots: Tensor, kv_latent: Tensor, k_rope: Tensor) -> None:
        """See `KvPools`."""
        self.before_access(layer)
        store = self._latents[layer]
        if self.layout.latent_format == FP8:
            store[kv_slots] = latent_pack.pack_latent_fp8(kv_latent, k_rope, scale_ue8m0=_SCALE_UE8M0)
        else:
            store[kv_slots] = latent_pack.pack_latent_plain(kv_latent, k_rope, dtype=store.dtype)

    def read_latent(self, layer: int, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KvPools`."""
        self.before_access(layer)
        packed = self._latents[layer].index_select(0, kv_slots)
        unpack = latent_pack.unpack_latent_plain
        if self.layout.latent_format == FP8:
            unpack = latent_pack.unpack_latent_fp8
        return unpack(packed, latent=self.layout.latent_dim, rope=self.layout.rope_dim, dtype=self._dtype)

    def write_index_k(self, layer: int, kv_slots: Tensor, index_k: Tensor) -> None:
        """See `KvPools`."""
        self.before_access(layer)
        store = self._index_keys[layer]
        if self.layout.index_format == FP8:
            index_key_pack.write_index_keys(store, kv_slots, index_k, scale_ue8m0=_SCALE_UE8M0)
        else:
            store[kv_slots] = index_k.to(store.dtype)

    def read_index_k(self, layer: int, kv_slots: Tensor) -> Tensor:
        """See `KvPools`."""
        self.before_access(layer)
        store = self._index_keys[layer]
        if self.layout.index_format == FP8:
            return index_key_pack.read_index_keys(store, kv_slots, dtype=self._dtype)
        return store.index_select(0, kv_slots).to(self._dtype)


def _ignore(layer: int) -> None:
    """No copies are under way."""


def host_capacity_pages(layout: KvLayout, *, max_total_tokens: int | None, useful_tokens: int) -> int:
    """Pages, the sink excluded, for pools in host memory.

    `max_total_tokens` decides where it is given. Otherwise a quarter of the memory that is free now, and no more than
    `useful_tokens`, what all running requests together could fill. (Memory is taken as pages are first written.)
    """
    if max_total_tokens is not None:
        return _at_least_one(max_total_tokens // PAGE_SIZE_TOKENS, layout)
    affordable = int(_HOST_MEMORY_FRACTION * _available_host_bytes()) // layout.bytes_per_page
    return _at_least_one(min(affordable, math.ceil(useful_tokens / PAGE_SIZE_TOKENS)), layout)


def device_capacity_pages(
    layout: KvLayout, *, max_total_tokens: int | None, free_before: int, free_now: int, mem_fraction_static: float
) -> int:
    """Pages, the sink excluded, for pools in device memory.

    Weights and pages together take `mem_fraction_static` of what was free before loading; `max_total_tokens` only
    lowers that. ValueError if the weights leave no room.
    """
    budget = free_now - free_before * (1.0 - mem_fraction_static)
    pages = int(budget // layout.bytes_per_page) - 1
    if max_total_tokens is not None:
        pages = min(pages, max_total_tokens // PAGE_SIZE_TOKENS)
    if pages < 1:
        raise ValueError(
            f"no device memory is left for the KV cache: of {free_before / 2**30:.1f} GiB that were free, "
            f"{free_now / 2**30:.1f} GiB are free after loading the weights; raise --mem-fraction-static, "
            f"now {mem_fraction_static}, or take a larger device"
        )
    return pages


def _at_least_one(pages: int, layout: KvLayout) -> int:
    if pages < 1:
        raise ValueError(
            f"no memory is left for the KV cache: one page takes {layout.bytes_per_page:,} bytes; "
            "free some memory or set --max-total-tokens"
        )
    return pages


def _zeros(num_layers: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One tensor per layer. On the host the operating system hands out zeroed memory when it is first touched."""
    if device.type != "cpu":
        return [torch.zeros(*shape, dtype=dtype, device=device) for _ in range(num_layers)]
    num_bytes = math.prod(shape) * dtype.itemsize
    return [torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(*shape) for _ in range(num_layers)]


def _available_host_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
