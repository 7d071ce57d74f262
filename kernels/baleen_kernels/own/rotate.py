"""Triton: rotation of the last channels of every head, interleaved pairs, from one tensor into another or itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import narrow


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
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, ROPE // 2)[None, :]
    mask = head < num_heads
    angle = cos_sin + tl.load(positions + token) * ROPE + pair
    cos, sin = tl.load(angle), tl.load(angle + ROPE // 2)
    source = q + token * q_stride + head * Q_WIDTH + (Q_WIDTH - ROPE) + 2 * pair
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
    target = out + token * out_stride + head * OUT_WIDTH + (OUT_WIDTH - ROPE) + 2 * pair
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target, narrow(first * cos - second * sin, dtype), mask=mask)
    tl.store(target + 1, narrow(first * sin + second * cos, dtype), mask=mask)


def rotate_tail(q: Tensor, cos_sin: Tensor, positions: Tensor, out: Tensor) -> None:
    """Writes the rotated last R channels of q [T, H, D] to the last R channels of out [T, H, E]; `out` may be q."""
    num_tokens, num_heads, width = q.shape
    assert out.stride(1) == out.shape[2]
    assert cos_sin.is_contiguous()
    if num_tokens:
        heads = 32
        _rotate_tail[(num_tokens, triton.cdiv(num_heads, heads))](
            q,
            cos_sin,
            positions,
            out,
            num_heads,
            q.stride(0),
            out.stride(0),
            Q_WIDTH=width,
            OUT_WIDTH=out.shape[2],
            ROPE=cos_sin.shape[1],
            HEADS=heads,
            num_warps=2,
        )
