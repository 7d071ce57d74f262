"""Triton: a block-FP8 product of at most 16 tokens, weights as the tall operand, channels summed in parts.

Parts of a tile leave their sums in memory; the program that comes last, by a ticket, adds them in order. A ticket is
zero between launches, and launches of one stream follow each other, so every stream has tickets of its own.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baleen_kernels.own import dependent_launch
from baleen_kernels.own.fp8 import GROUP, INTERPRETED, narrow

ROWS = tl.constexpr(16)
_MOST_TILES = 8192
_STAGES = {64: 4, 128: 5}  # steps that are loaded ahead, by output channels of a tile
_STAGES_OF_MANY = 3  # so that a third block of threads finds room where two leave a rest
_MANY_TILES = 264
_MULTIPROCESSORS = 132  # of an H200


@triton.jit
def _multiply(
    values,
    scales,
    weight,
    weight_scale,
    out,
    sums,
    tickets,
    num_tokens,
    token_stride,
    group_stride,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    dependent_launch.wait(EARLY)
    tile, part = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = WIDTH // GROUP
    size: tl.constexpr = (blocks + PARTS - 1) // PARTS
    token = tl.arange(0, ROWS)
    column = tile * TILE + tl.arange(0, TILE)
    # Rows without a token do the last one again, which needs no masks.
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    x_place = values + row[:, None] * WIDTH + tl.arange(0, GROUP)[None, :]
    x_scales = scales + row * token_stride
    w_scales = weight_scale + (column // GROUP) * blocks
    total = tl.zeros((TILE, ROWS), tl.float32)
    for block in tl.range(part * size, tl.minimum((part + 1) * size, blocks), num_stages=STAGES):
        w = weight.load([tile * TILE, block * GROUP])
        x = tl.load(x_place + block * GROUP)
        x_scale = tl.load(x_scales + block * group_stride)
        w_scale = tl.load(w_scales + block)
        if INTERPRETED:
            product = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
        else:
            product = tl.dot(w, tl.trans(x))
        total += product * (w_scale[:, None] * x_scale[None, :])
    last = True
    if PARTS > 1:
        place = tl.arange(0, TILE)[:, None] * ROWS + token[None, :]
        mine = sums + tile * (PARTS * TILE * ROWS)
        tl.store(mine + part * (TILE * ROWS) + place, total)
        tl.debug_barrier()
        last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            total = tl.zeros((TILE, ROWS), tl.float32)
            for other in tl.static_range(PARTS):
                total += tl.load(mine + other * (TILE * ROWS) + place, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
    if last:
        result = narrow(tl.trans(total), out.dtype.element_ty)
        tl.store(out + token[:, None] * OUT + column[None, :], result, mask=(token < num_tokens)[:, None])


@functools.lru_cache(maxsize=64)
def _tickets(device: torch.device, stream: int) -> Tensor:
    """[tiles] int32, zero: of one stream."""
    del stream
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def multiply(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    dtype: torch.dtype,
    tile: int,
    parts: int,
) -> Tensor:
    """Contract and shapes as in `baleen_kernels.thin_gemm`, which also says what `tile` and `parts` are."""
    (num_tokens, width), out_features, device = values.shape, weight.shape[0], values.device
    out = torch.empty(num_tokens, out_features, dtype=dtype, device=device)
    if num_tokens:
        tiles = out_features // tile
        assert parts == 1 or tiles <= _MOST_TILES
        stream = torch.cuda.current_stream(device).cuda_stream if values.is_cuda else 0
        sums = torch.empty(tiles * parts * tile * ROWS.value if parts > 1 else 1, dtype=torch.float32, device=device)
        _multiply[(tiles, parts)](
            values,
            scales,
            TensorDescriptor.from_tensor(weight, [tile, GROUP.value]),
            weight_scale,
            out,
            sums,
            _tickets(device, stream),
            num_tokens,
            scales.stride(0),
            scales.stride(1),
            OUT=out_features,
            WIDTH=width,
            TILE=tile,
            PARTS=parts,
            STAGES=_STAGES_OF_MANY if tiles > _MANY_TILES and tile == 128 else _STAGES[tile],
            num_warps=4,
            **dependent_launch.options(values, when=tiles * parts >= _MULTIPROCESSORS),
        )
    return out
