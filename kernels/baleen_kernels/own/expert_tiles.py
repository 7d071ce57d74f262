"""Triton: feed-forward of experts that have a few tokens each, bound by reading their weights.

A tile is up to 16 picks of one expert. A program takes one tile and some output channels: weights are the tall operand
of the tensor cores and tokens the narrow one, so that nothing is computed for rows that are not there, and rows are
read where they lie. Weights arrive by the bulk copy engine where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baleen_kernels.own import dependent_launch
from baleen_kernels.own.fp8 import GROUP, INTERPRETED, narrow, scale_of, to_e4m3

ROWS = tl.constexpr(16)


@triton.jit
def _tiles(expert_ids, tile_expert, tile_picks, num_picks, num_tiles, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program an expert; all of them count all picks, to know how many tiles lie before theirs."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    members = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_picks, BLOCK):
        present = start + block < num_picks
        picked = tl.load(expert_ids + start + block, mask=present, other=0).to(tl.int32)
        counts += tl.histogram(picked, EXPERTS, mask=present)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(members < expert, tiles, 0), 0)
    count = tl.sum(tl.where(members == expert, counts, 0), 0)
    own_tiles = (count + ROWS - 1) // ROWS
    rank = first * ROWS
    for start in range(0, num_picks, BLOCK):
        present = start + block < num_picks
        mine = tl.load(expert_ids + start + block, mask=present, other=-1).to(tl.int32) == expert
        place = rank + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(tile_picks + place, start + block, mask=mine)
        rank += tl.sum(mine.to(tl.int32), 0)
    row = tl.arange(0, ROWS)
    tl.store(tile_picks + rank + row, tl.full((ROWS,), -1, tl.int32), mask=rank + row < (first + own_tiles) * ROWS)
    for tile in range(own_tiles):
        tl.store(tile_expert + first + tile, expert)
    if expert == 0:
        used = tl.sum(tiles, 0)
        for start in range(0, num_tiles, EXPERTS):
            tl.store(tile_expert + start + members, -1, mask=(start + members >= used) & (start + members < num_tiles))


def tiles(expert_ids: Tensor, *, num_experts: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.expert_tiles`."""
    num_picks, device = expert_ids.numel(), expert_ids.device
    tile_expert = torch.empty(num_tiles, dtype=torch.int32, device=device)
    tile_picks = torch.empty(num_tiles, ROWS.value, dtype=torch.int32, device=device)
    if num_picks:
        _tiles[(num_experts,)](
            expert_ids.contiguous(),
            tile_expert,
            tile_picks,
            num_picks,
            num_tiles,
            EXPERTS=num_experts,
            BLOCK=min(1024, max(32, triton.next_power_of_2(num_picks))),
            num_warps=4,
        )
    return tile_expert, tile_picks


@triton.jit
def _weights(weight, first, block, WIDTH: tl.constexpr, ROWS: tl.constexpr, BULK: tl.constexpr):
    """Rows `first` .. of all experts' weights, one group of channels."""
    if BULK:
        w = weight.load([first, block * GROUP])
    else:
        row = first.to(tl.int64) + tl.arange(0, ROWS)
        w = tl.load(weight + row[:, None] * WIDTH + block * GROUP + tl.arange(0, GROUP)[None, :])
    return w


@triton.jit
def _product(w, x):
    """w [rows, channels] . x [picks, channels] -> [rows, picks] float32."""
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    return tl.dot(w, tl.trans(x))


@triton.jit
def _hidden(
    values,
    scales,
    weight,
    weight_scale,
    tile_expert,
    tile_picks,
    hidden,
    hidden_scales,
    token_stride,
    group_stride,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    PICKS: tl.constexpr,
    UE8M0: tl.constexpr,
    DTYPE: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    dependent_launch.wait(EARLY)
    parts: tl.constexpr = HIDDEN // GROUP
    blocks: tl.constexpr = WIDTH // GROUP
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        pick = tl.load(tile_picks + tile * ROWS + tl.arange(0, ROWS))
        place = tl.maximum(pick, 0).to(tl.int64)
        token = place // PICKS
        channel = tl.arange(0, GROUP)
        row = values + token[:, None] * WIDTH + channel[None, :]
        row_scales = scales + token * token_stride
        gate_scales = weight_scale + (expert * (2 * parts) + part) * blocks + tl.zeros((GROUP,), tl.int32)
        up_scales = gate_scales + parts * blocks
        gate_row = expert * (2 * HIDDEN) + part * GROUP
        gate = tl.zeros((GROUP, ROWS), tl.float32)
        up = tl.zeros((GROUP, ROWS), tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            gate_weights = _weights(weight, gate_row, block, WIDTH, GROUP, BULK)
            up_weights = _weights(weight, gate_row + HIDDEN, block, WIDTH, GROUP, BULK)
            x = tl.load(row + block * GROUP)
            x_scale = tl.load(row_scales + block * group_stride)
            gate_scale = tl.load(gate_scales + block)
            up_scale = tl.load(up_scales + block)
            gate += _product(gate_weights, x) * (gate_scale[:, None] * x_scale[None, :])
            up += _product(up_weights, x) * (up_scale[:, None] * x_scale[None, :])
        gate, up = narrow(gate, DTYPE).to(tl.float32), narrow(up, DTYPE).to(tl.float32)
        y = tl.trans(narrow(tl.div_rn(gate, 1 + tl.exp(-gate)) * up, DTYPE).to(tl.float32))
        scale = scale_of(tl.max(tl.abs(y), 1), UE8M0)
        target = hidden + place[:, None] * HIDDEN + part * GROUP + channel[None, :]
        tl.store(target, to_e4m3(y, scale[:, None], UE8M0), mask=(pick >= 0)[:, None])
        tl.store(hidden_scales + place * parts + part, scale, mask=pick >= 0)


@triton.jit
def _out(
    values,
    scales,
    weight,
    weight_scale,
    tile_expert,
    tile_picks,
    out,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    dependent_launch.wait(EARLY)
    parts: tl.constexpr = OUT // BLOCK
    blocks: tl.constexpr = WIDTH // GROUP
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        pick = tl.load(tile_picks + tile * ROWS + tl.arange(0, ROWS))
        place = tl.maximum(pick, 0).to(tl.int64)
        channel = tl.arange(0, GROUP)
        column = part * BLOCK + tl.arange(0, BLOCK)
        row = values + place[:, None] * WIDTH + channel[None, :]
        row_scales = scales + place * blocks
        weight_scales = weight_scale + (expert * (OUT // GROUP) + column // GROUP) * blocks
        total = tl.zeros((BLOCK, ROWS), tl.float32)
        for block in tl.range(0, blocks, num_stages=STAGES):
            w = _weights(weight, expert * OUT + part * BLOCK, block, WIDTH, BLOCK, BULK)
            x = tl.load(row + block * GROUP)
            x_scale = tl.load(row_scales + block)
            w_scale = tl.load(weight_scales + block)
            total += _product(w, x) * (w_scale[:, None] * x_scale[None, :])
        y = narrow(tl.trans(total), out.dtype.element_ty)
        tl.store(out + place[:, None] * OUT + column[None, :], y, mask=(pick >= 0)[:, None])


@dataclass(frozen=True, slots=True)
class Tiles:
    """experts [B], picks [B, 16] int32, as `tiles` makes them."""

    experts: Tensor
    picks: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """values [E, N, K] float8_e4m3fn, scales [E, N / 128, K / 128] float32."""

    values: Tensor
    scales: Tensor

    def argument(self, rows: int, *, bulk: bool) -> Tensor | TensorDescriptor:
        """What a kernel reads weights by."""
        flat = self.values.flatten(0, 1)
        return TensorDescriptor.from_tensor(flat, [rows, GROUP.value]) if bulk else flat


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is cut: output channels and warps of a program, steps that are loaded ahead."""

    channels: int
    warps: int
    stages: int
    bulk: bool


HIDDEN_SHAPE = Shape(128, 4, 5, bulk=True)
OUT_SHAPE = Shape(256, 4, 6, bulk=True)
# Of no more programs than twice the multiprocessors: two find room on each.
FEW_HIDDEN_SHAPE = Shape(128, 4, 3, bulk=True)
FEW_OUT_SHAPE = Shape(256, 8, 3, bulk=True)
_FEW_PROGRAMS = 264


def hidden(
    values: Tensor,
    scales: Tensor,
    weights: Weights,
    tiles: Tiles,
    *,
    picks: int,
    scale_ue8m0: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.expert_tiles`."""
    num_tokens, width = values.shape
    num_picks, hidden_width = num_tokens * picks, weights.values.shape[1] // 2
    assert values.is_contiguous()
    out = torch.empty(num_picks, hidden_width, dtype=values.dtype, device=values.device)
    out_scales = torch.empty(num_picks, hidden_width // 128, dtype=torch.float32, device=values.device)
    programs = tiles.experts.shape[0] * (hidden_width // 128)
    shape = FEW_HIDDEN_SHAPE if programs <= _FEW_PROGRAMS else HIDDEN_SHAPE
    _hidden[(programs,)](
        values,
        scales,
        weights.argument(128, bulk=shape.bulk),
        weights.scales,
        tiles.experts,
        tiles.picks,
        out,
        out_scales,
        scales.stride(0),
        scales.stride(1),
        WIDTH=width,
        HIDDEN=hidden_width,
        PICKS=picks,
        UE8M0=scale_ue8m0,
        DTYPE=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        BULK=shape.bulk,
        STAGES=shape.stages,
        num_warps=shape.warps,
        **dependent_launch.options(values),
    )
    return out, out_scales


def out(values: Tensor, scales: Tensor, weights: Weights, tiles: Tiles, *, dtype: torch.dtype) -> Tensor:
    """Contract and shapes as in `baleen_kernels.expert_tiles`."""
    num_picks, width = values.shape
    out_width = weights.values.shape[1]
    channels = OUT_SHAPE.channels if out_width % OUT_SHAPE.channels == 0 else 128
    programs = tiles.experts.shape[0] * (out_width // channels)
    shape = FEW_OUT_SHAPE if programs <= _FEW_PROGRAMS else OUT_SHAPE
    assert values.is_contiguous()
    assert scales.is_contiguous()
    result = torch.empty(num_picks, out_width, dtype=dtype, device=values.device)
    _out[(programs,)](
        values,
        scales,
        weights.argument(channels, bulk=shape.bulk),
        weights.scales,
        tiles.experts,
        tiles.picks,
        result,
        WIDTH=width,
        OUT=out_width,
        BLOCK=channels,
        BULK=shape.bulk,
        STAGES=shape.stages,
        num_warps=shape.warps,
        **dependent_launch.options(values),
    )
    return result
