"""Triton: absorbed latent attention over selected slots, on any GPU that Triton compiles for.

A program takes some heads of one part of a token's selection. It gathers a tile of slots at a time into shared memory,
where the latents serve twice, as keys and as values, and keeps the running maximum and sum of an online softmax. Slots
that are not there are not read: their keys are zeros and their weights too. Hopper GPUs have a form of their own,
`mla_slots_hopper`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from baleen_kernels.own.fp8 import GROUP, INTERPRETED, narrow

ROPE = tl.constexpr(64)
PAGE = tl.constexpr(64)
LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
# Below every score, and finite, so that differences of two of them are numbers.
LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads and slots of a step, steps that are loaded ahead, and warps."""

    heads: int
    keys: int
    stages: int
    warps: int


# By bytes of shared memory of a block, largest first.
_TILES = ((220 << 10, Tile(64, 64, 2, 8)), (150 << 10, Tile(64, 32, 3, 8)), (90 << 10, Tile(32, 16, 2, 4)))
_SMALLEST = Tile(16, 16, 1, 4)
# Of what is not 227 KiB; on Blackwell Triton keeps more there, so it gets the smaller tile.
_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 100: 163 << 10, 103: 163 << 10, 120: 99 << 10}


def tile_of(arch: int | str, num_heads: int, *, wide: bool) -> Tile:
    """`arch`: as Triton names a target, 90 or "gfx942". `wide`: float32 numbers, twice the bytes."""
    if wide or isinstance(arch, str):
        return _SMALLEST
    room = _SHARED_BYTES.get(arch, 227 << 10)
    tile = next((tile for least, tile in _TILES if room >= least), _SMALLEST)
    heads = min(tile.heads, max(16, triton.next_power_of_2(num_heads)))
    return Tile(heads, tile.keys, tile.stages, tile.warps if heads == 64 else 4)


@triton.jit
def widen(codes):
    """e4m3 codes as float32, by integer arithmetic: GPUs before compute capability 8.9 have no such numbers."""
    bits = codes.to(tl.int32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((bits & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def _multiply(a, b, total):
    if INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["num_heads", "size", "parts"])
def _attend(
    q,
    latents,
    scales,
    ropes,
    slots,
    lengths,
    out,
    sums,
    scale_log2,
    num_heads,
    size,
    parts,
    C: tl.constexpr,
    ROW: tl.constexpr,
    PACKED: tl.constexpr,
    PAGED: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    work = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    channel, rope, key = tl.arange(0, C), tl.arange(0, ROPE), tl.arange(0, KEYS)
    live = (head < num_heads)[:, None]
    q_place = q + ((work // parts) * num_heads + head)[:, None] * (C + ROPE)
    q_latent = tl.load(q_place + channel[None, :], mask=live, other=0.0)
    q_rope = tl.load(q_place + C + rope[None, :], mask=live, other=0.0)
    largest = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, C), tl.float32)
    mine, end = slots + work * size, size
    if PAGED:  # a table has a page for each 64 places; those of this part end with the part, or with the row
        mine = slots + (work * size) // PAGE
        end = tl.minimum(size, tl.load(lengths + work // parts) - (work % parts).to(tl.int32) * size)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        place = start + key
        if PAGED:
            slot = tl.load(mine + place // PAGE, mask=place < end, other=-1).to(tl.int64) * PAGE + place % PAGE
        else:
            slot = tl.load(mine + place, mask=place < end, other=-1).to(tl.int64)
        present = slot >= 0
        row = latents + slot[:, None] * ROW
        latent = tl.load(row + channel[None, :], mask=present[:, None], other=0)
        if PACKED:
            groups: tl.constexpr = C // GROUP
            group = tl.arange(0, groups)
            scale_place = scales + slot[:, None] * (ROW // 4) + C // 4 + group[None, :]
            scale = tl.load(scale_place, mask=present[:, None], other=0.0)
            wide = tl.reshape(widen(latent), KEYS, groups, GROUP) * scale[:, :, None]
            latent = narrow(tl.reshape(wide, KEYS, C), q_latent.dtype)
            rope_place = ropes + slot[:, None] * (ROW // 2) + C // 2 + 2 * groups + rope[None, :]
        else:
            rope_place = row + C + rope[None, :]
        k_rope = tl.load(rope_place, mask=present[:, None], other=0.0)
        score = _multiply(q_latent, tl.trans(latent), tl.zeros((HEADS, KEYS), tl.float32))
        score = _multiply(q_rope, tl.trans(k_rope), score)
        score = tl.where(present[None, :], score * scale_log2, float("-inf"))
        highest = tl.maximum(largest, tl.max(score, 1))
        fade = tl.exp2(largest - highest)
        weight = tl.exp2(score - highest[:, None])
        total = total * fade + tl.sum(weight, 1)
        result = _multiply(narrow(weight, q_latent.dtype), latent, result * fade[:, None])
        largest = highest
    result *= tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    tl.store(
        out + (work * num_heads + head)[:, None] * C + channel[None, :], narrow(result, out.dtype.element_ty), mask=live
    )
    lse = tl.where(total == 0.0, float("-inf"), (largest + tl.log2(total)) * _LN_2)
    tl.store(sums + work * num_heads + head, lse, mask=head < num_heads)


def on_hopper() -> bool:
    """Whether the current device is a Hopper GPU, for which `mla_slots_hopper` is there."""
    return not INTERPRETED and driver.active.get_current_target().arch == 90


def attend(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float, parts: int) -> tuple[Tensor, Tensor]:
    """Shapes as in `baleen_kernels.mla_slots`, contiguous. `parts`: into how many equal parts a selection is cut.

    -> results [T, parts, H, C], and the log-sum-exps of their scores [T, parts, H].
    """
    return _launch(q, latents, slots, None, slots.shape[1] // parts, softmax_scale, parts)


def attend_pages(
    q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float, parts: int
) -> tuple[Tensor, Tensor]:
    """Shapes as in `baleen_kernels.mla_pages`, contiguous. Results as those of `attend`, `parts` of equally many pages
    of a table, the last of fewer.
    """
    pages = triton.cdiv(tables.shape[1], parts)
    if pages * parts > tables.shape[1]:
        tables = torch.nn.functional.pad(tables, (0, pages * parts - tables.shape[1]))
    return _launch(q, latents, tables, lengths, pages * PAGE.value, softmax_scale, parts)


def _launch(
    q: Tensor, latents: Tensor, slots: Tensor, lengths: Tensor | None, size: int, softmax_scale: float, parts: int
) -> tuple[Tensor, Tensor]:
    """`size`: places of a part; `slots`: one for each place, or with `lengths` pages of 64 places."""
    (num_tokens, num_heads, width), packed = q.shape, latents.dtype == torch.uint8
    out, sums = outputs(q, parts)
    if num_tokens:
        arch = 90 if INTERPRETED else driver.active.get_current_target().arch
        tile = tile_of(arch, num_heads, wide=q.dtype == torch.float32)
        _attend[(triton.cdiv(num_heads, tile.heads), num_tokens * parts)](
            q,
            latents,
            latents.view(torch.float32) if packed else latents,
            latents.view(torch.bfloat16) if packed else latents,
            slots,
            slots if lengths is None else lengths,
            out,
            sums,
            softmax_scale * LOG2_E,
            num_heads,
            size,
            parts,
            C=width - ROPE.value,
            ROW=latents.shape[1],
            PACKED=packed,
            PAGED=lengths is not None,
            HEADS=tile.heads,
            KEYS=tile.keys,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return out, sums


def outputs(q: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Room for what `attend` returns."""
    num_tokens, num_heads, width = q.shape
    out = torch.empty(num_tokens, parts, num_heads, width - ROPE.value, dtype=q.dtype, device=q.device)
    return out, torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
