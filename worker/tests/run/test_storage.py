"""Pages hold exactly what their layout says, where it says, and nothing else of the pool changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from baleen_kernels.fp8_quant import round_groups
from baleen_worker.cache.storage import (
    KvLayout,
    PagedPools,
    choose_layout,
    device_capacity_pages,
    host_capacity_pages,
)
from baleen_worker.model_config import load_model_config

if TYPE_CHECKING:
    from torch import Tensor

MICRO = load_model_config(Path(__file__).parents[3] / "models" / "micro")
RELEASED = replace(MICRO, num_hidden_layers=61, index_layers=(True,) * 61)
CPU = torch.device("cpu")

FLOAT32 = choose_layout(MICRO, dtype=torch.float32, kv_cache_dtype="auto", index_hadamard=False)
BFLOAT16 = choose_layout(MICRO, dtype=torch.bfloat16, kv_cache_dtype="auto", index_hadamard=True)
PACKED = choose_layout(MICRO, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", index_hadamard=True)
LAYOUTS = pytest.mark.parametrize("layout", [FLOAT32, BFLOAT16, PACKED], ids=["float32", "bfloat16", "fp8"])


def make_pools(layout: KvLayout, num_pages: int = 5, dtype: torch.dtype = torch.float32) -> PagedPools:
    return PagedPools(layout, num_pages, device=CPU, dtype=dtype)


def make_keys(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, width, generator=g) for width in (512, 64, 128))  # type: ignore[return-value]


def kept(layout: KvLayout, latent: Tensor, rope: Tensor, index_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a layout's rounding leaves."""
    if layout.latent_format == "float32":
        return latent, rope, index_k
    rope, index_k = rope.bfloat16().float(), round_groups(index_k, scale_ue8m0=True)
    if layout.latent_format == "bfloat16":
        return latent.bfloat16().float(), rope, index_k
    return round_groups(latent, scale_ue8m0=True), rope, index_k


# Both sides of page boundaries, the last slot of the pool, the sink, and no order.
SLOTS = torch.tensor([127, 128, 64, 63, 319, 0, 200, 65])


@LAYOUTS
@pytest.mark.parametrize("layer", [0, 2])
def test_what_is_written_is_read(layout: KvLayout, layer: int) -> None:
    pools = make_pools(layout)
    latent, rope, index_k = make_keys(len(SLOTS))
    pools.write_latent(layer, SLOTS, latent, rope)
    pools.write_index_k(layer, SLOTS, index_k)
    order = torch.tensor([3, 3, 0, 7, 5, 1, 2, 4, 6])
    found = *pools.read_latent(layer, SLOTS[order]), pools.read_index_k(layer, SLOTS[order])
    for tensor, expected in zip(found, kept(layout, latent, rope, index_k), strict=True):
        assert torch.equal(tensor, expected[order])


@LAYOUTS
def test_only_the_named_slots_change(layout: KvLayout) -> None:
    pools = make_pools(layout)
    everything = torch.arange(5 * 64)
    for layer in range(3):
        latent, rope, index_k = make_keys(5 * 64, seed=layer)
        pools.write_latent(layer, everything, latent, rope)
        pools.write_index_k(layer, everything, index_k)
    before = [(*pools.read_latent(layer, everything), pools.read_index_k(layer, everything)) for layer in range(3)]
    latent, rope, index_k = make_keys(len(SLOTS), seed=9)
    pools.write_latent(1, SLOTS, latent, rope)
    pools.write_index_k(1, SLOTS, index_k)
    others = torch.tensor([slot for slot in range(5 * 64) if slot not in SLOTS.tolist()])
    for layer in range(3):
        after = *pools.read_latent(layer, everything), pools.read_index_k(layer, everything)
        for old, new in zip(before[layer], after, strict=True):
            assert torch.equal(old[others], new[others])
            assert torch.equal(old[SLOTS], new[SLOTS]) == (layer != 1)


@LAYOUTS
def test_reads_come_in_the_compute_type(layout: KvLayout) -> None:
    pools = make_pools(layout, dtype=torch.bfloat16)
    found = *pools.read_latent(0, SLOTS), pools.read_index_k(0, SLOTS)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 3
    assert all(not tensor.any() for tensor in found)


def test_writing_again_what_was_read_changes_nothing() -> None:
    pools = make_pools(PACKED)
    latent, rope, index_k = make_keys(len(SLOTS))
    pools.write_latent(0, SLOTS, latent, rope)
    pools.write_index_k(0, SLOTS, index_k)
    pages = [pools.page_bytes(0, page) for page in range(5)]
    before = [(latents.clone(), keys.clone()) for latents, keys in pages if keys is not None]
    pools.write_latent(0, SLOTS, *pools.read_latent(0, SLOTS))
    pools.write_index_k(0, SLOTS, pools.read_index_k(0, SLOTS))
    for (latents, keys), (old_latents, old_keys) in zip(pages, before, strict=True):
        assert torch.equal(latents, old_latents)
        assert keys is not None
        assert torch.equal(keys, old_keys)


def test_bytes_of_a_packed_page() -> None:
    pools = make_pools(PACKED)
    latent, rope, index_k = make_keys(1)
    slot, offset = torch.tensor([2 * 64 + 7]), 7
    pools.write_latent(1, slot, latent, rope)
    pools.write_index_k(1, slot, index_k)
    latents, keys = pools.page_bytes(1, 2)
    assert keys is not None
    assert (latents.numel(), keys.numel()) == (64 * 656, 8448)
    row = latents[offset * 656 : (offset + 1) * 656]
    values, scales = row[:512].view(torch.float8_e4m3fn).float(), row[512:528].view(torch.float32)
    assert torch.equal((values.view(4, 128) * scales[:, None]).flatten(), round_groups(latent, scale_ue8m0=True)[0])
    assert torch.equal(row[528:].view(torch.bfloat16), rope[0].bfloat16())
    key = keys[offset * 128 : (offset + 1) * 128].view(torch.float8_e4m3fn).float()
    scale = keys[8192 + 4 * offset : 8196 + 4 * offset].view(torch.float32)
    assert torch.equal(key * scale, round_groups(index_k, scale_ue8m0=True)[0])
    assert int((latents != 0).sum() + (keys != 0).sum()) <= 656 + 132


@pytest.mark.parametrize(
    ("kv_cache_dtype", "bytes_per_token"), [("auto", 78_324), ("bfloat16", 78_324), ("fp8_e4m3", 48_068)]
)
def test_sizes_of_the_released_model(kv_cache_dtype: str, bytes_per_token: int) -> None:
    layout = choose_layout(RELEASED, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, index_hadamard=True)
    assert layout.bytes_per_token == bytes_per_token
    assert layout.bytes_per_page == 64 * bytes_per_token


def test_float32_rounds_nothing() -> None:
    assert (FLOAT32.latent_bytes, FLOAT32.index_bytes) == (4 * 576, 4 * 128)


def test_without_an_indexer_there_are_no_index_keys() -> None:
    config = replace(MICRO, model_type="deepseek_v3", index_topk=0, index_head_dim=0, index_n_heads=0)
    layout = choose_layout(config, dtype=torch.bfloat16, kv_cache_dtype="auto", index_hadamard=True)
    assert (layout.index_bytes, layout.index_hadamard) == (0, False)
    assert make_pools(layout).page_bytes(0, 1)[1] is None


def test_layout_ids_tell_layouts_apart() -> None:
    layouts = [FLOAT32, BFLOAT16, PACKED, replace(BFLOAT16, index_hadamard=False), replace(BFLOAT16, num_layers=4)]
    layouts.append(replace(BFLOAT16, model_digest="f" * 64))
    assert len({layout.layout_id for layout in layouts}) == len(layouts)
    assert "latent=fp8_e4m3:656;index_k=fp8_e4m3:132;page=64;layers=3;hadamard=1" in PACKED.layout_id


def test_widths_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        choose_layout(
            replace(MICRO, kv_lora_rank=200), dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", index_hadamard=True
        )
    with pytest.raises(ValueError, match="at most 128 channels"):
        choose_layout(
            replace(MICRO, index_head_dim=256), dtype=torch.bfloat16, kv_cache_dtype="auto", index_hadamard=True
        )


def test_host_capacity() -> None:
    assert host_capacity_pages(FLOAT32, max_total_tokens=1000, useful_tokens=1) == 15
    assert host_capacity_pages(FLOAT32, max_total_tokens=None, useful_tokens=129) == 3
    huge = host_capacity_pages(FLOAT32, max_total_tokens=None, useful_tokens=1 << 60)
    assert 1 <= huge < (1 << 50) // FLOAT32.bytes_per_page


def test_device_capacity() -> None:
    page = BFLOAT16.bytes_per_page
    room = {"free_before": 1000 * page, "free_now": 700 * page, "mem_fraction_static": 0.9}
    # 100 pages stay free, the sink takes one.
    assert device_capacity_pages(BFLOAT16, max_total_tokens=None, **room) in (598, 599)
    assert device_capacity_pages(BFLOAT16, max_total_tokens=640, **room) == 10
    assert device_capacity_pages(BFLOAT16, max_total_tokens=1 << 40, **room) in (598, 599)
    with pytest.raises(ValueError, match="no device memory is left for the KV cache"):
        device_capacity_pages(BFLOAT16, max_total_tokens=None, **(room | {"free_now": 100 * page}))
