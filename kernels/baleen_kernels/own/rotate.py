"""Triton: rotation of the last channels of every head, interleaved pairs, from one tensor into another or itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import narrow


@triton.jit
def _turn(first, second, cos, sin, dtype: tl.constexpr):
    return narrow(first * cos - second * sin, dtype), narrow(first * sin + second * cos, dtype)


@triton.jit
def _rotate_tail(
    q,
    cos_sin,
    positions,
    out,
    num_heads,
    q_stride,
    out_stride,
    Q_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Two bfloat16 channels of a pair are one word of 32 bits; q, out, strides and widths then count words."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, ROPE // 2)[None, :]
    mask = head < num_heads
    angle = cos_sin + tl.load(positions + token) * ROPE + pair
    cos, sin = tl.load(angle), tl.load(angle + ROPE // 2)
    source = q + token * q_stride + head * Q_WIDTH
    target = out + token * out_stride + head * OUT_WIDTH
    if tl.bfloat16 == DTYPE:
        word = tl.load(source + (Q_WIDTH - ROPE // 2) + pair, mask=mask, other=0)
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -0x10000).to(tl.float32, bitcast=True)
        low, high = _turn(first, second, cos, sin, DTYPE)
        low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high_bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(target + (OUT_WIDTH - ROPE // 2) + pair, low_bits | high_bits, mask=mask)
    else:
        place = source + (Q_WIDTH - ROPE) + 2 * pair
        low, high = _turn(
            tl.load(place, mask=mask, other=0.0), tl.load(place + 1, mask=mask, other=0.0), cos, sin, DTYPE
        )
        place = target + (OUT_WIDTH - ROPE) + 2 * pair
        tl.store(place, low, mask=mask)
        tl.store(place + 1, high, mask=mask)


def rotate_tail(q: Tensor, cos_sin: Tensor, positions: Tensor, out: Tensor) -> None:
    """Writes the rotated last R channels of q [T, H, D] to the last R channels of out [T, H, E]; `out` may be q."""
    num_tokens, num_heads, width = q.shape
    assert out.stride(1) == out.shape[2]
    assert cos_sin.is_contiguous()
    narrow_type = q.dtype == torch.bfloat16
    size = 2 if narrow_type else 1
    assert width % size == out.shape[2] % size == q.stride(0) % size == out.stride(0) % size == 0
    if num_tokens:
        heads = min(128, triton.next_power_of_2(num_heads))
        _rotate_tail[(num_tokens, triton.cdiv(num_heads, heads))](
            q.view(torch.int32) if narrow_type else q,
            cos_sin,
            positions,
            out.view(torch.int32) if narrow_type else out,
            num_heads,
            q.stride(0) // size,
            out.stride(0) // size,
            Q_WIDTH=width // size,
            OUT_WIDTH=out.shape[2] // size,
            ROPE=cos_sin.shape[1],
            HEADS=heads,
            DTYPE=tl.bfloat16 if narrow_type else tl.float32,
            num_warps=4,
        )
