"""Triton: norms of both latents, rotation of the rope key, rounding and storing, one launch.

Two programs a token: one norms and rounds the query latent, the other makes the entry of the latent pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own import dependent_launch
from baleen_kernels.own.fp8 import GROUP, column_scales, narrow, scale_of, to_e4m3


@triton.jit
def _normed(x, weight, width: tl.constexpr, eps, DTYPE: tl.constexpr):
    inverse = 1 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 1), 0) / width + eps)
    return narrow(weight * (x * inverse), DTYPE)


@triton.jit
def _prepare(
    x,
    q_weight,
    kv_weight,
    cos_sin,
    positions,
    slots,
    latents,
    q_values,
    q_scales,
    x_stride,
    scale_stride,
    eps,
    QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PACKED: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    dependent_launch.release(EARLY)
    dependent_launch.wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    row = x + token * x_stride
    dtype: tl.constexpr = x.dtype.element_ty
    if tl.program_id(1) == 0:
        q_group = tl.arange(0, BLOCK // GROUP)
        q_column = q_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = q_column < QUERY
        q = tl.load(row + q_column, mask=mask, other=0.0).to(tl.float32)
        q_normed = _normed(q, tl.load(q_weight + q_column, mask=mask, other=0.0), QUERY, eps, dtype).to(tl.float32)
        q_scale = scale_of(tl.max(tl.abs(q_normed), 1), UE8M0)
        tl.store(q_scales + q_group * scale_stride + token, q_scale, mask=q_group < QUERY // GROUP)
        tl.store(q_values + token * QUERY + q_column, to_e4m3(q_normed, q_scale[:, None], UE8M0), mask=mask)
    else:
        slot = tl.load(slots + token)
        group = tl.arange(0, LATENT // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        latent = tl.load(row + QUERY + column).to(tl.float32)
        normed = _normed(latent, tl.load(kv_weight + column), LATENT, eps, dtype)
        position = tl.load(positions + token)
        pair = tl.arange(0, ROPE // 2)
        cos = tl.load(cos_sin + position * ROPE + pair)
        sin = tl.load(cos_sin + position * ROPE + ROPE // 2 + pair)
        first = tl.load(row + QUERY + LATENT + 2 * pair).to(tl.float32)
        second = tl.load(row + QUERY + LATENT + 2 * pair + 1).to(tl.float32)
        turned = narrow(first * cos - second * sin, dtype)
        turned_second = narrow(first * sin + second * cos, dtype)
        if PACKED:
            packed = latents + slot * (LATENT + LATENT // 32 + 2 * ROPE)
            wide = normed.to(tl.float32)
            scale = scale_of(tl.max(tl.abs(wide), 1), UE8M0)
            tl.store(packed + column, to_e4m3(wide, scale[:, None], UE8M0).to(tl.uint8, bitcast=True))
            tl.store((packed + LATENT).to(tl.pointer_type(tl.float32)) + group, scale)
            rope = (packed + LATENT + LATENT // 32).to(tl.pointer_type(tl.bfloat16))
            tl.store(rope + 2 * pair, narrow(turned.to(tl.float32), tl.bfloat16))
            tl.store(rope + 2 * pair + 1, narrow(turned_second.to(tl.float32), tl.bfloat16))
        else:
            entry = latents + slot * (LATENT + ROPE)
            tl.store(entry + column, normed)
            tl.store(entry + LATENT + 2 * pair, turned)
            tl.store(entry + LATENT + 2 * pair + 1, turned_second)


def prepare(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.mla_prep`."""
    num_tokens, query = x.shape[0], q_weight.shape[0]
    values = torch.empty(num_tokens, query, dtype=torch.float8_e4m3fn, device=x.device)
    scales = column_scales(num_tokens, query // 128, x.device)
    assert latents.is_contiguous()
    assert cos_sin.is_contiguous()
    if num_tokens:
        _prepare[(num_tokens, 2)](
            x,
            q_weight,
            kv_weight,
            cos_sin,
            positions,
            slots,
            latents,
            values,
            scales,
            x.stride(0),
            scales.stride(1),
            eps,
            QUERY=query,
            BLOCK=triton.next_power_of_2(query),
            LATENT=kv_weight.shape[0],
            ROPE=cos_sin.shape[1],
            PACKED=latents.dtype == torch.uint8,
            UE8M0=scale_ue8m0,
            num_warps=4 if num_tokens <= 512 else 1,
            **dependent_launch.options(x, when=num_tokens <= dependent_launch.MOST_ROWS),
        )
    return values, scales
