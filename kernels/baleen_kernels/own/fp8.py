"""Triton: rounding to FP8 in groups of 128 channels, alone and as a part of other kernels.

Scales of activations are written column by column, each column padded to a multiple of four (16 bytes): the layout that
FP8 matrix products load. As a tensor [T, G] its strides are (1, T rounded up).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = tl.constexpr(128)
E4M3_MAX = tl.constexpr(448.0)
MIN_AMAX = tl.constexpr(1e-4)
# Rounded as in `fp8_quant`: amax times this, not amax divided by 448.
INVERSE_MAX = tl.constexpr(0.002232142857142857)
# Triton's interpreter truncates where a GPU rounds, so it is given numbers that need no rounding.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def column_scales(num_rows: int, num_groups: int, device: torch.device) -> Tensor:
    """Scales [T, G] with adjacent rows, columns 16-byte aligned."""
    return torch.empty(num_groups, -(-num_rows // 4) * 4, dtype=torch.float32, device=device).T[:num_rows]


@triton.jit
def scale_of(amax, UE8M0: tl.constexpr):
    """The scale of a group with this largest magnitude; a power of two with UE8M0."""
    scale = tl.maximum(amax, MIN_AMAX) * INVERSE_MAX
    if UE8M0:
        # Adding all mantissa bits carries into the exponent unless the scale is a power of two already.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to the dtype, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_e4m3(x, scale, UE8M0: tl.constexpr):
    """x / scale, rounded to nearest, ties to even, within range; NaN stays NaN."""
    if UE8M0:  # the inverse of a power of two is exact
        scaled = x * (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        scaled = tl.div_rn(x, scale)
    if INTERPRETED:  # a GPU's conversion stays within range and rounds by itself
        scaled = tl.clamp(scaled, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        bits = scaled.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        magic = tl.where(bits < 0, -24576.0, 24576.0)  # its last place is 2^-9, the step of e4m3's subnormals
        scaled = tl.where(tl.abs(scaled) < 0.015625, (scaled + magic) - magic, normal)
    return scaled.to(tl.float8e4nv)


@triton.jit
def _quantize(
    x, values, scales, num_rows, row_stride, scale_stride, WIDTH: tl.constexpr, UE8M0: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    columns = group * GROUP + tl.arange(0, GROUP)
    mask = (rows < num_rows)[:, None]
    part = tl.load(x + rows[:, None].to(tl.int64) * row_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(part), 1), UE8M0)
    tl.store(
        values + rows[:, None].to(tl.int64) * WIDTH + columns[None, :], to_e4m3(part, scale[:, None], UE8M0), mask=mask
    )
    tl.store(scales + group * scale_stride + rows, scale, mask=rows < num_rows)


def quantize(x: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """x [T, N], N a multiple of 128, rows at any distance -> values [T, N] float8_e4m3fn, scales [T, N / 128]."""
    num_rows, width = x.shape
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = column_scales(num_rows, width // 128, x.device)
    if num_rows:
        block = 1 if num_rows <= 8 else 16
        grid = (triton.cdiv(num_rows, block), width // 128)
        _quantize[grid](
            x,
            values,
            scales,
            num_rows,
            x.stride(0),
            scales.stride(1),
            WIDTH=width,
            UE8M0=scale_ue8m0,
            ROWS=block,
            num_warps=1 if block == 1 else 4,
        )
    return values, scales
