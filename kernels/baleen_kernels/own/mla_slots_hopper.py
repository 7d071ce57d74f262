"""Gluon, Triton's lower language: `mla_slots` for Hopper, with warps that load and warps that multiply.

A block takes 64 heads of one part of a token's selection, 64 slots at a time, two tiles in flight. Four warps gather:
plain tiles by asynchronous copies, packed ones through registers, where they become bfloat16. Two groups of four warps
multiply; each computes all scores of a tile, which costs a second product and saves every exchange between the groups,
and one half of the channels of the result. While one group is at its softmax the other keeps the tensor cores busy.

Gluon's names change between Triton's versions; these are those of 3.6, and of 3.9 where it has others.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baleen_kernels.own.mla_slots import LOG2_E, outputs

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
_GROUP = gl.constexpr(128)
_LOWEST = gl.constexpr(-1e30)
_LN_2 = gl.constexpr(0.6931471805599453)
# Rows of 512 channels, 16 bytes a thread; rows of 64 channels; rows of 128 bytes, 8 bytes a thread.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_THIN = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_BYTES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_COPY = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _slots_of(mine, tile, size, WHOLE: gl.constexpr, layout: gl.constexpr):
    """The slots of a tile, -1 behind the last. `WHOLE`: the size is one of whole tiles."""
    key = tile * KEYS + gl.arange(0, KEYS, layout)
    if WHOLE:
        return gl.load(mine + key)
    return gl.load(mine + key, mask=key < size, other=-1)


@gluon.jit
def _gather(latents, ropes, scales, mine, k_latent, k_rope, full, empty, size, ROW: gl.constexpr, WHOLE: gl.constexpr):
    """The warps that load, from a bfloat16 pool. What is not there becomes zeros."""
    channel = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))
    rope = gl.arange(0, ROPE, gl.SliceLayout(0, _THIN))
    tiles = (size + KEYS - 1) // KEYS
    slot = _slots_of(mine, 0, size, WHOLE, gl.SliceLayout(1, _WIDE))
    thin = _slots_of(mine, 0, size, WHOLE, gl.SliceLayout(1, _THIN))
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        place = latents + slot.to(gl.int64)[:, None] * ROW + channel[None, :]
        _COPY(k_latent.index(stage), place, mask=(slot >= 0)[:, None])
        rope_place = ropes + thin.to(gl.int64)[:, None] * ROW + LATENT + rope[None, :]
        _COPY(k_rope.index(stage), rope_place, mask=(thin >= 0)[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        if tile + 1 < tiles:
            slot = _slots_of(mine, tile + 1, size, WHOLE, gl.SliceLayout(1, _WIDE))
            thin = _slots_of(mine, tile + 1, size, WHOLE, gl.SliceLayout(1, _THIN))


@gluon.jit
def _unpack(latents, ropes, scales, mine, k_latent, k_rope, full, empty, size, ROW: gl.constexpr, WHOLE: gl.constexpr):
    """The warps that load, from a packed pool: FP8 numbers and a scale for each 128 of them become bfloat16."""
    byte = gl.arange(0, _GROUP, gl.SliceLayout(0, _BYTES))
    rope = gl.arange(0, ROPE, gl.SliceLayout(0, _THIN))
    tiles = (size + KEYS - 1) // KEYS
    groups: gl.constexpr = LATENT // _GROUP
    slot = _slots_of(mine, 0, size, WHOLE, gl.SliceLayout(1, _BYTES))
    thin = _slots_of(mine, 0, size, WHOLE, gl.SliceLayout(1, _THIN))
    for tile in range(tiles):
        stage = tile % STAGES
        row, present = slot.to(gl.int64), slot >= 0
        rope_place = ropes + thin.to(gl.int64)[:, None] * (ROW // 2) + LATENT // 2 + 2 * groups + rope[None, :]
        codes = gl.load(latents + row[:, None] * ROW + byte[None, :], mask=present[:, None], other=0)
        scale = gl.load(scales + row * (ROW // 4) + LATENT // 4, mask=present, other=0.0)
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        _COPY(k_rope.index(stage), rope_place, mask=(thin >= 0)[:, None])
        async_copy.commit_group()
        for group in gl.static_range(groups):
            value = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale[:, None]
            if group + 1 < groups:
                place = latents + row[:, None] * ROW + (group + 1) * _GROUP + byte[None, :]
                codes = gl.load(place, mask=present[:, None], other=0)
                scale = gl.load(scales + row * (ROW // 4) + LATENT // 4 + group + 1, mask=present, other=0.0)
            k_latent.index(stage).slice(group * _GROUP, _GROUP, dim=1).store(value.to(gl.bfloat16))
        if tile + 1 < tiles:
            slot = _slots_of(mine, tile + 1, size, WHOLE, gl.SliceLayout(1, _BYTES))
            thin = _slots_of(mine, tile + 1, size, WHOLE, gl.SliceLayout(1, _THIN))
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _multiply(
    HALF: gl.constexpr,
    q_latent,
    q_rope,
    k_latent,
    k_rope,
    full,
    empty,
    done,
    mine,
    out,
    sums,
    work,
    scale_log2,
    zero,
    num_heads,
    size,
    WHOLE: gl.constexpr,
):
    """One of the two groups of warps that multiply: all scores, and half the channels of the result.

    `done`: both groups have read the queries for the last time, so that results may take their place.
    """
    WIDTH: gl.constexpr = LATENT // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    wide_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    largest = gl.full((HEADS,), _LOWEST, gl.float32, row)
    total = gl.zeros((HEADS,), gl.float32, row)
    result = gl.zeros((HEADS, WIDTH), gl.float32, layout)
    nothing = gl.zeros((HEADS, KEYS), gl.float32, score_layout)
    for tile in range((size + KEYS - 1) // KEYS):
        stage = tile % STAGES
        # An index that the compiler cannot know keeps it from holding all addresses of q in registers.
        at = tile * zero
        slot = _slots_of(mine, tile, size, WHOLE, gl.SliceLayout(0, score_layout))
        mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
        fence_async_shared()
        latent = k_latent.index(stage)
        score = warpgroup_mma(q_latent.index(at), latent.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma(q_rope.index(at), k_rope.index(stage).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        score = gl.where((slot >= 0)[None, :], score, float("-inf"))
        highest = gl.maximum(largest, gl.max(score, 1) * scale_log2)
        fade = gl.exp2(largest - highest)
        weight = gl.exp2(score * scale_log2 - highest[:, None])
        total = total * fade + gl.sum(weight, 1)
        largest = highest
        result = result * gl.convert_layout(fade, wide_row)[:, None]
        weight = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2))
        result = warpgroup_mma(weight, latent.slice(HALF * WIDTH, WIDTH, dim=1), result, is_async=True)
        result = warpgroup_mma_wait(0, deps=[result])
        mbarrier.arrive(empty.index(stage), count=1)
    result = result * gl.convert_layout(gl.where(total == 0.0, 0.0, 1.0 / total), wide_row)[:, None]
    # Through shared memory: registers hold pieces of 4 bytes, and a warp is to write whole rows.
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    rows = q_latent.index(0).slice(HALF * WIDTH, WIDTH, dim=1)
    rows.store(result.to(gl.bfloat16))
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, by_row))
    channel = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, by_row))
    place = out + (work * num_heads + head)[:, None] * LATENT + channel[None, :]
    gl.store(place, rows.load(by_row), mask=(head < num_heads)[:, None])
    if HALF == 0:
        head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, row)
        lse = gl.where(total == 0.0, float("-inf"), (largest + gl.log2(total)) * _LN_2)
        gl.store(sums + work * num_heads + head, lse, mask=head < num_heads)


@gluon.jit(do_not_specialize=["zero", "num_heads", "size", "parts"])
def _attend(
    q,
    latents,
    ropes,
    scales,
    slots,
    out,
    sums,
    scale_log2,
    zero,
    num_heads,
    size,
    parts,
    ROW: gl.constexpr,
    PACKED: gl.constexpr,
    WHOLE: gl.constexpr,
):
    work = gl.program_id(1).to(gl.int64)
    mine = slots + work * size
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, LATENT], swizzled)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, ROPE], swizzled)
    k_latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, LATENT], swizzled)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, ROPE], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=2)
    for stage in gl.static_range(STAGES):
        # Copies arrive thread by thread, stores through registers once.
        mbarrier.init(full.index(stage), count=1 if PACKED else 128)
        mbarrier.init(empty.index(stage), count=2)
    mine_q = q + (work // parts) * (num_heads * (LATENT + ROPE))
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _WIDE))
    channel = gl.arange(0, LATENT, gl.SliceLayout(0, _WIDE))
    _COPY(
        q_latent.index(0), mine_q + head[:, None] * (LATENT + ROPE) + channel[None, :], mask=(head < num_heads)[:, None]
    )
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _THIN))
    rope = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, _THIN))
    _COPY(q_rope.index(0), mine_q + head[:, None] * (LATENT + ROPE) + rope[None, :], mask=(head < num_heads)[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    # Written out, because numbers that pass through a variable are no longer constants.
    gl.warp_specialize(
        [
            (
                _unpack if PACKED else _gather,
                (
                    latents,
                    ropes,
                    scales,
                    mine,
                    k_latent,
                    k_rope,
                    full,
                    empty,
                    size,
                    gl.constexpr(ROW),
                    gl.constexpr(WHOLE),
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(0),
                    q_latent,
                    q_rope,
                    k_latent,
                    k_rope,
                    full,
                    empty,
                    done,
                    mine,
                    out,
                    sums,
                    work,
                    scale_log2,
                    zero,
                    num_heads,
                    size,
                    gl.constexpr(WHOLE),
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(1),
                    q_latent,
                    q_rope,
                    k_latent,
                    k_rope,
                    full,
                    empty,
                    done,
                    mine,
                    out,
                    sums,
                    work,
                    scale_log2,
                    zero,
                    num_heads,
                    size,
                    gl.constexpr(WHOLE),
                ),
            ),
        ],
        [4, 4],
        [208, 208] if PACKED else [216, 216],
    )


def attend(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float, parts: int) -> tuple[Tensor, Tensor]:
    """As `baleen_kernels.own.mla_slots.attend`, for bfloat16 queries of 512 + 64 channels."""
    (num_tokens, num_heads, _), packed = q.shape, latents.dtype == torch.uint8
    out, sums = outputs(q, parts)
    if num_tokens:
        _attend[(triton.cdiv(num_heads, HEADS.value), num_tokens * parts)](
            q,
            latents,
            latents.view(torch.bfloat16) if packed else latents,
            latents.view(torch.float32) if packed else latents,
            slots,
            out,
            sums,
            softmax_scale * LOG2_E,
            0,
            num_heads,
            slots.shape[1] // parts,
            parts,
            ROW=latents.shape[1],
            PACKED=packed,
            WHOLE=slots.shape[1] // parts % KEYS.value == 0,
            num_warps=4,
        )
    return out, sums
