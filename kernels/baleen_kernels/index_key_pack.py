"""Byte layout of cached index keys: FP8, by pages of 64 tokens.

A page is a row of uint8: first 64 keys of D bytes e4m3, then 64 float32 scales, so 64 * (D + 4) bytes, 8448 for the
released model. Byte t * D starts key t, byte 64 * D + 4 * t its scale; keys and scales do not alternate. One scale per
key (D at most 128, one group of `fp8_quant`), a power of two with `scale_ue8m0`; readers take any scale.
A slot is page * 64 + offset.

write_index_keys: stores index_k [T, D] in pages [P, 64 * (D + 4)] at slots [T], in place.
read_index_keys: pages, slots [n] -> [n, D] in the given dtype.
gather_index_keys: pages, table [W] -> of the tokens of those pages in order, values [64 W, D] float8_e4m3fn and scales
[64 W] float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant
from baleen_kernels.registry import Op

PAGE_SIZE = 64


def index_page_bytes(width: int) -> int:
    """Bytes of a page of keys of that width; ValueError above one quantization group."""
    if not 0 < width <= fp8_quant.GROUP:
        raise ValueError(f"FP8 index keys have one scale for at most {fp8_quant.GROUP} channels, got {width}")
    return PAGE_SIZE * (width + 4)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_pages: int
    slots: tuple[int, ...]
    width: int = 128
    scale_ue8m0: bool = True


CASES = (
    Case("released", 3, (64, 65, 127, 128, 190, 0)),
    Case("plain_scale", 2, (3, 64, 127), scale_ue8m0=False),
    Case("narrow", 2, (63, 64), width=32),
    Case("nothing", 2, ()),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Pages full of old bytes, and new keys for some slots."""
    g = torch.Generator().manual_seed(0)
    shape = (case.num_pages, index_page_bytes(case.width))
    return {
        "pages": torch.randint(0, 256, shape, generator=g, dtype=torch.uint8),
        "slots": torch.tensor(case.slots, dtype=torch.int64),
        "index_k": torch.randn(len(case.slots), case.width, generator=g),
        "scale_ue8m0": case.scale_ue8m0,
    }


def reference(pages: Tensor, slots: Tensor, index_k: Tensor, *, scale_ue8m0: bool) -> None:
    """The contract, key by key."""
    width = index_k.shape[1]
    for slot, key in zip(slots.tolist(), index_k, strict=True):
        values, scale = fp8_quant.reference(key, scale_ue8m0=scale_ue8m0)
        page, offset = divmod(slot, PAGE_SIZE)
        pages[page, offset * width : (offset + 1) * width] = values.view(torch.uint8)
        start = PAGE_SIZE * width + 4 * offset
        pages[page, start : start + 4] = scale.view(torch.uint8)


OP = Op("index_key_pack", reference, CASES, make_inputs, atol=0, rtol=0)


def _views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """pages -> (keys [P, 64, D], scales [P, 64, 4]), both uint8 views."""
    width = pages.shape[1] // PAGE_SIZE - 4
    keys, scales = pages.split([PAGE_SIZE * width, PAGE_SIZE * 4], 1)
    return keys.unflatten(1, (PAGE_SIZE, width)), scales.unflatten(1, (PAGE_SIZE, 4))


@OP.backend("torch")
def _torch(pages: Tensor, slots: Tensor, index_k: Tensor, *, scale_ue8m0: bool) -> None:
    values, scales = fp8_quant.quantize_groups(index_k, scale_ue8m0=scale_ue8m0)
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    page_keys, page_scales = _views(pages)
    page_keys[page, offset] = values.contiguous().view(torch.uint8)
    page_scales[page, offset] = scales.contiguous().view(torch.uint8)


def write_index_keys(
    pages: Tensor, slots: Tensor, index_k: Tensor, *, scale_ue8m0: bool, backend: str = "torch"
) -> None:
    """See the module docstring. ValueError if the pages are not of the keys' width."""
    if pages.shape[1] != index_page_bytes(index_k.shape[1]):
        raise ValueError(f"pages of {pages.shape[1]} bytes do not hold keys of {index_k.shape[1]} channels")
    OP.pick(backend)(pages, slots, index_k, scale_ue8m0=scale_ue8m0)


def read_index_keys(pages: Tensor, slots: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See the module docstring."""
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    page_keys, page_scales = _views(pages)
    values = page_keys[page, offset].view(torch.float8_e4m3fn)
    scales = page_scales[page, offset].view(torch.float32)
    return fp8_quant.dequantize_groups(values, scales).to(dtype)


def gather_index_keys(pages: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    page_keys, page_scales = _views(pages.index_select(0, table))
    return page_keys.flatten(0, 1).contiguous().view(torch.float8_e4m3fn), page_scales.flatten().view(torch.float32)
