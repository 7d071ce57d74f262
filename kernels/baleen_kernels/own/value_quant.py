"""Triton: values of one head for at most 16 tokens and their rounding to FP8, one program a head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import GROUP, INTERPRETED, column_scales, narrow, scale_of, to_e4m3

ROWS = tl.constexpr(16)
_CHANNELS = 64  # of a step: 16 KiB of weights
_STAGES = 7


@triton.jit
def _value_quant(
    latents,
    up_v,
    values,
    scales,
    num_tokens,
    token_stride,
    head_stride,
    scale_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    UE8M0: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.arange(0, ROWS)
    column = tl.arange(0, GROUP)
    channel = tl.arange(0, CHANNELS)
    # Rows without a token do the last one again, which needs no masks.
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    x_place = latents + row[:, None] * token_stride + head * head_stride + channel[None, :]
    w_place = up_v + (head.to(tl.int64) * LATENT + channel)[:, None] * GROUP + column[None, :]
    total = tl.zeros((ROWS, GROUP), tl.float32)
    for step in tl.range(0, LATENT // CHANNELS, num_stages=STAGES):
        x, w = tl.load(x_place + step * CHANNELS), tl.load(w_place + step * (CHANNELS * GROUP))
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    y = narrow(total, latents.dtype.element_ty).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(y), 1), UE8M0)
    present = token < num_tokens
    target = values + token[:, None] * (HEADS * GROUP) + head * GROUP + column[None, :]
    tl.store(target, to_e4m3(y, scale[:, None], UE8M0), mask=present[:, None])
    tl.store(scales + head * scale_stride + token, scale, mask=present)


def value_quant(latents: Tensor, up_v: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.value_quant`; scales in the layout of `own.fp8`."""
    num_tokens, heads, latent = latents.shape
    assert latents.stride(2) == 1
    assert up_v.is_contiguous()
    values = torch.empty(num_tokens, heads * GROUP.value, dtype=torch.float8_e4m3fn, device=latents.device)
    scales = column_scales(num_tokens, heads, latents.device)
    if num_tokens:
        _value_quant[(heads,)](
            latents,
            up_v,
            values,
            scales,
            num_tokens,
            latents.stride(0),
            latents.stride(1),
            scales.stride(1),
            HEADS=heads,
            LATENT=latent,
            CHANNELS=_CHANNELS,
            STAGES=_STAGES,
            UE8M0=scale_ue8m0,
            num_warps=4,
        )
    return values, scales
