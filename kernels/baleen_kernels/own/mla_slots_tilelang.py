"""TileLang: `mla_slots` for Hopper over plain pools, with every score computed once.

A block takes 64 heads of one part of a token's selection, and two tiles of 64 slots at a time. Three groups of four
warps share it. One gathers rows into shared memory by asynchronous copies. Two multiply: one computes the scores of
even tiles, the other those of odd ones, and each keeps one half of the channels of the result, for which it needs the
weights of both. They hand each other weights in shared memory, where the rotary part of the tile's keys was until its
scores were known, and the running maximum that the weights refer to. The odd group comes half a turn later, so that one
is at its softmax while the other keeps the tensor cores busy.

Synchronisation is written out: TileLang's own would stop whole groups. Barriers are waited for by the parity of a turn.
The names are those of TileLang 0.1.15. Without `from __future__ import annotations`: TileLang reads the annotations.
"""

import functools
from dataclasses import dataclass
from typing import Any

import tilelang
import tilelang.language as T  # noqa: N812 - its own name for it
from torch import Tensor

from baleen_kernels.own.mla_slots import LOG2_E, outputs

LATENT, ROPE, HEADS, KEYS, STAGES = 512, 64, 64, 64, 2
HALF = LATENT // 2
# Threads of a group; registers of a thread of the group that loads, and of those that multiply.
GROUP, LOADING, MULTIPLYING = 128, 72, 216
# Channels of 16 bytes; threads that copy a row, and rows that a group copies at a time.
_WIDE, _COPIERS = 8, 8
_ROWS = GROUP // _COPIERS
# Below every score, and finite, so that differences of two of them are numbers.
_LOWEST, _LN_2 = -1e30, 0.6931471805599453
_EVEN, _ODD = 0, 1
TARGET = {"kind": "cuda", "arch": "sm_90a"}
PASSES = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,  # every access has a bound of its own
}


@dataclass
class Shared:
    """What the groups of a block share; `present`: slots of a tile; barriers by what they say."""

    q: Any
    k: Any
    present: Any
    highs: Any
    totals: Any
    full: Any
    empty: Any
    told: Any
    handed: Any
    met: Any


@dataclass
class Private:
    """Registers of a group that multiplies, a row for each head. `fade`: what the rows of `result` shrink by."""

    score: Any
    result: Any
    high: Any
    fade: Any
    theirs: Any
    total: Any
    fresh: Any


def _private() -> Private:
    rows = [T.alloc_fragment([HEADS], "float32") for _ in range(5)]
    return Private(T.alloc_fragment([HEADS, KEYS], "float32"), T.alloc_fragment([HEADS, HALF], "float32"), *rows)


@T.macro
def _look_up(slots, row, width, tile, thread, ahead):
    """The slots that a thread copies from next, -1 behind the last."""
    for turn in T.unroll(KEYS // _ROWS):
        place = tile * KEYS + turn * _ROWS + thread // _COPIERS
        ahead[turn] = T.if_then_else(place < width, slots[row, place], -1)


@T.macro
def _gather(shared, latents, slots, row, width, thread):
    """The group that loads. What is not there becomes zeros."""
    ahead = T.alloc_local([KEYS // _ROWS], "int32")
    _look_up(slots, row, width, 0, thread, ahead)
    for pair in T.serial(T.ceildiv(width, STAGES * KEYS)):
        for stage in T.unroll(STAGES, explicit=True):
            T.barrier_wait(shared.empty[stage], (pair & 1) ^ 1)
            for turn in T.unroll(KEYS // _ROWS):
                key = turn * _ROWS + thread // _COPIERS
                if thread % _COPIERS == 0:
                    shared.present[stage, key] = ahead[turn]
                for piece in T.unroll((LATENT + ROPE) // (_COPIERS * _WIDE)):
                    channel = (piece * _COPIERS + thread % _COPIERS) * _WIDE
                    T.ptx_cp_async(
                        T.access_ptr(shared.k[stage, key, channel], "w", _WIDE),
                        T.access_ptr(latents[T.max(ahead[turn], 0), channel], "r", _WIDE),
                        _WIDE,
                        ahead[turn] >= 0,
                    )
            T.cp_async_barrier_noinc(shared.full[stage])
            T.barrier_arrive(shared.full[stage])
            _look_up(slots, row, width, pair * STAGES + stage + 1, thread, ahead)


@T.macro
def _start_scores(shared, own, tile, parity):
    """Until `T.wait_wgmma`, the tensor cores are at it."""
    T.barrier_wait(shared.full[tile], parity)
    T.fence_proxy_async()
    T.wgmma_gemm(shared.q, shared.k[tile, :, :], own.score, transpose_B=True, clear_accum=True)


@T.macro
def _tell_maximum(shared, own, tile):
    """Of scores that are there; the maximum before it is left in `fade`."""
    T.copy(own.high, own.fade)
    for h, s in T.Parallel(HEADS, KEYS):
        own.score[h, s] = T.if_then_else(shared.present[tile, s] >= 0, own.score[h, s], -T.infinity("float32"))
    T.reduce_max(own.score, own.high, dim=1, clear=False)
    T.copy(own.high, shared.highs[tile, :])
    T.barrier_arrive(shared.told[tile])


@T.macro
def _hear_maximum(shared, own, tile, parity, scale_log2):
    """The other group's, which is never below ours."""
    T.barrier_wait(shared.told[tile], parity)
    T.copy(shared.highs[tile, :], own.theirs)
    for h in T.Parallel(HEADS):
        own.fade[h] = T.exp2((own.high[h] - own.theirs[h]) * scale_log2)
    for h in T.Parallel(HEADS):
        own.total[h] *= own.fade[h]
    T.copy(own.theirs, own.high)


@T.macro
def _hand_weights(shared, own, tile, scale_log2):
    """Scores become weights, in place of the keys' rotary part."""
    for h in T.Parallel(HEADS):
        own.fade[h] = T.exp2((own.fade[h] - own.high[h]) * scale_log2)
    for h, s in T.Parallel(HEADS, KEYS):
        own.score[h, s] = T.exp2(own.score[h, s] * scale_log2 - own.high[h] * scale_log2)
    T.reduce_sum(own.score, own.fresh, dim=1)
    for h in T.Parallel(HEADS):
        own.total[h] = own.total[h] * own.fade[h] + own.fresh[h]
    T.copy(own.score, shared.k[tile, :, LATENT:])
    T.fence_proxy_async()
    T.barrier_arrive(shared.handed[tile])


@T.macro
def _shrink(own):
    for h, c in T.Parallel(HEADS, HALF):
        own.result[h, c] *= own.fade[h]


@T.macro
def _start_values(shared, own, me, tile, parity):
    """Adds a tile's weighted values."""
    T.barrier_wait(shared.full[tile], parity)
    T.barrier_wait(shared.handed[tile], parity)
    T.fence_proxy_async()
    T.wgmma_gemm(shared.k[tile, :, LATENT:], shared.k[tile, :, me * HALF : (me + 1) * HALF], own.result)


@T.macro
def _finish_values(shared, tile):
    T.wait_wgmma(0)
    T.barrier_arrive(shared.empty[tile])


@T.macro
def _even_turn(shared, own, parity, scale_log2):
    _start_scores(shared, own, _EVEN, parity)
    T.wait_wgmma(0)
    _tell_maximum(shared, own, _EVEN)
    _hand_weights(shared, own, _EVEN, scale_log2)
    _shrink(own)
    _start_values(shared, own, _EVEN, _EVEN, parity)
    _hear_maximum(shared, own, _ODD, parity, scale_log2)
    _finish_values(shared, _EVEN)
    _shrink(own)
    _start_values(shared, own, _EVEN, _ODD, parity)
    _finish_values(shared, _ODD)


@T.macro
def _odd_turn(shared, own, parity, scale_log2):
    _start_scores(shared, own, _ODD, parity)
    _hear_maximum(shared, own, _EVEN, parity, scale_log2)
    T.wait_wgmma(0)
    _shrink(own)
    _start_values(shared, own, _ODD, _EVEN, parity)
    _tell_maximum(shared, own, _ODD)
    _hand_weights(shared, own, _ODD, scale_log2)
    _finish_values(shared, _EVEN)
    _shrink(own)
    _start_values(shared, own, _ODD, _ODD, parity)
    _finish_values(shared, _ODD)


@T.macro
def _multiply(shared, me, out, sums, row, first, heads, width, scale_log2):
    """A group that multiplies. A token that selects nothing gets zeros, and minus infinity as its sum."""
    own = _private()
    T.fill(own.result, 0)
    T.fill(own.total, 0)
    T.fill(own.high, _LOWEST)
    for pair in T.serial(T.ceildiv(width, STAGES * KEYS)):
        if me == _EVEN:
            _even_turn(shared, own, pair & 1, scale_log2)
        else:
            _odd_turn(shared, own, pair & 1, scale_log2)
    T.copy(own.total, shared.totals[me, :])
    T.barrier_arrive(shared.met)
    T.barrier_wait(shared.met, 0)
    T.copy(shared.totals[1 - me, :], own.theirs)
    for h in T.Parallel(HEADS):
        own.total[h] += own.theirs[h]
    for h in T.Parallel(HEADS):
        own.fade[h] = T.if_then_else(own.total[h] > 0, 1.0 / own.total[h], 0.0)
    _shrink(own)
    # Both groups are done with the queries, in whose place rows are put together.
    T.copy(own.result, shared.q[:, me * HALF : (me + 1) * HALF])
    T.sync_threads(me + 1, GROUP)
    for h, c in T.Parallel(HEADS, HALF):
        if first + h < heads:
            out[row, first + h, me * HALF + c] = shared.q[h, me * HALF + c]
    if me == _EVEN:
        for h in T.Parallel(HEADS):
            if first + h < heads:
                sums[row, first + h] = T.if_then_else(
                    own.total[h] > 0, (own.high[h] * scale_log2 + T.log2(own.total[h])) * _LN_2, -T.infinity("float32")
                )


def program() -> Any:
    """The kernel before it is compiled, for any number of tokens, heads, slots and parts."""
    tokens, heads, pool, width, work = T.dynamic("tokens, heads, pool, width, work")

    @T.prim_func
    def mla_slots(
        q: T.Tensor([tokens, heads, LATENT + ROPE], "bfloat16"),
        latents: T.Tensor([pool, LATENT + ROPE], "bfloat16"),
        slots: T.Tensor([work, width], "int32"),
        out: T.Tensor([work, heads, LATENT], "bfloat16"),
        sums: T.Tensor([work, heads], "float32"),
        parts: T.int32,
        scale_log2: T.float32,
    ):
        with T.Kernel(T.ceildiv(heads, HEADS) * work, threads=3 * GROUP) as block:
            shared = Shared(
                q=T.alloc_shared([HEADS, LATENT + ROPE], "bfloat16"),
                k=T.alloc_shared([STAGES, KEYS, LATENT + ROPE], "bfloat16"),
                present=T.alloc_shared([STAGES, KEYS], "int32"),
                highs=T.alloc_shared([STAGES, HEADS], "float32"),
                totals=T.alloc_shared([STAGES, HEADS], "float32"),
                full=T.alloc_barrier([2 * GROUP] * STAGES),
                empty=T.alloc_barrier([2 * GROUP] * STAGES),
                told=T.alloc_barrier([GROUP] * STAGES),
                handed=T.alloc_barrier([GROUP] * STAGES),
                met=T.alloc_barrier(2 * GROUP),
            )
            loaded = T.alloc_barrier(3 * GROUP)
            thread = T.get_thread_binding()
            row = T.truncdiv(block, T.ceildiv(heads, HEADS))
            token = T.truncdiv(row, parts)
            first = T.truncmod(block, T.ceildiv(heads, HEADS)) * HEADS
            for h, c in T.Parallel(HEADS, LATENT + ROPE):
                shared.q[h, c] = T.if_then_else(first + h < heads, q[token, first + h, c], 0)
            T.fence_proxy_async()
            T.barrier_arrive(loaded)
            if thread < GROUP:
                T.set_max_nreg(MULTIPLYING, 1)
                T.barrier_wait(loaded, 0)
                _multiply(shared, _EVEN, out, sums, row, first, heads, width, scale_log2)
            elif thread < 2 * GROUP:
                T.set_max_nreg(MULTIPLYING, 1)
                T.barrier_wait(loaded, 0)
                _multiply(shared, _ODD, out, sums, row, first, heads, width, scale_log2)
            else:
                T.set_max_nreg(LOADING, 0)
                _gather(shared, latents, slots, row, width, thread - 2 * GROUP)

    return mla_slots


@functools.cache
def _kernel() -> Any:
    """Compiled, by nvcc, at the first call; TileLang keeps the result on disk."""
    return tilelang.compile(program(), target=TARGET, pass_configs=PASSES)


def attend(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float, parts: int) -> tuple[Tensor, Tensor]:
    """Shapes and results as `own.mla_slots.attend`, for bfloat16 and 512 + 64 channels."""
    num_tokens, topk = slots.shape
    out, sums = outputs(q, parts)
    if num_tokens:
        rows = slots.view(num_tokens * parts, topk // parts)
        _kernel()(q, latents, rows, out.flatten(0, 1), sums.flatten(0, 1), parts, softmax_scale * LOG2_E)
    return out, sums
