"""Triton: queries of at most 16 tokens in latent space, one launch. A program takes a head and some latent channels;
the first of a head also rotates its rope channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import INTERPRETED, narrow

ROWS = tl.constexpr(16)
MOST_TOKENS = 16


@triton.jit
def _absorb(
    q,
    cos_sin,
    positions,
    up_k,
    out,
    num_tokens,
    q_stride,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.arange(0, ROWS)
    present = (token < num_tokens)[:, None]
    # Rows without a token do the last one again, which needs no masks for loads.
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    source = q + row[:, None] * q_stride + head * (NOPE + ROPE)
    target = out + (row[:, None] * NUM_HEADS + head) * (LATENT + ROPE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    w_place = up_k + (head.to(tl.int64) * NOPE + channel)[:, None] * LATENT + column[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in tl.range(0, NOPE // CHANNELS, num_stages=3):
        x = tl.load(source + step * CHANNELS + channel[None, :])
        w = tl.load(w_place + step * (CHANNELS * LATENT))
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    dtype: tl.constexpr = q.dtype.element_ty
    tl.store(target + column[None, :], narrow(total, dtype), mask=present)
    if tl.program_id(1) == 0:
        pair = tl.arange(0, ROPE // 2)[None, :]
        angle = cos_sin + tl.load(positions + row)[:, None] * ROPE + pair
        cos, sin = tl.load(angle), tl.load(angle + ROPE // 2)
        first = tl.load(source + NOPE + 2 * pair).to(tl.float32)
        second = tl.load(source + NOPE + 2 * pair + 1).to(tl.float32)
        tl.store(target + LATENT + 2 * pair, narrow(first * cos - second * sin, dtype), mask=present)
        tl.store(target + LATENT + 2 * pair + 1, narrow(first * sin + second * cos, dtype), mask=present)


def takes(num_tokens: int, nope: int, latent: int) -> bool:
    """Whether `absorb` computes these shapes."""
    return 0 < num_tokens <= MOST_TOKENS and nope % 64 == 0 and latent % 128 == 0


def absorb(q: Tensor, cos_sin: Tensor, positions: Tensor, up_k: Tensor) -> Tensor:
    """Contract and shapes as `absorb_queries` of `baleen_kernels.mla_query`."""
    num_tokens, (num_heads, nope, latent), rope = q.shape[0], up_k.shape, cos_sin.shape[1]
    assert up_k.is_contiguous()
    assert cos_sin.is_contiguous()
    out = torch.empty(num_tokens, num_heads, latent + rope, dtype=q.dtype, device=q.device)
    block = 128
    _absorb[(num_heads, latent // block)](
        q,
        cos_sin,
        positions,
        up_k,
        out,
        num_tokens,
        q.stride(0),
        NUM_HEADS=num_heads,
        NOPE=nope,
        ROPE=rope,
        LATENT=latent,
        BLOCK=block,
        CHANNELS=64,
        num_warps=4,
    )
    return out
