"""Triton: rotation, Hadamard transform and rounding of index queries, and the same with a LayerNorm for index keys.

The transform is a product with a matrix of signs, which tensor cores take: its operands are exact in bfloat16 and sums
are in float32.

Few tokens: one launch, whose first programs take heads of a token and whose last ones the keys of many. Many tokens: a
kernel of their own for the queries, whose programs keep the signs in shared memory, walk over tokens with the next ones
on their way, and rotate by a second look at the same channels, so that a token is one product and not three.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import INTERPRETED, narrow, scale_of, to_e4m3

_KEYS = 16
# Tokens from which queries have a kernel of their own, and how many of them one program takes.
_MANY = 512
_TOKENS = 8
_STAGES = 3
_WARPS = 4


@triton.jit
def _transform(first, second, rest, cos, sin, signs, partner_signs, rest_signs, DTYPE: tl.constexpr):
    """Rotates the pairs (first, second), transforms (rotated | rest), all of one dtype -> [rows, WIDTH] float32."""
    operand: tl.constexpr = signs.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned = narrow(x * cos - y * sin, DTYPE).to(operand)
    # In float32 "ieee" keeps all bits; bfloat16 operands are exact anyway.
    product = tl.dot(turned, signs, input_precision="ieee")
    turned = narrow(x * sin + y * cos, DTYPE).to(operand)
    product = tl.dot(turned, partner_signs, product, input_precision="ieee")
    product = tl.dot(rest.to(operand), rest_signs, product, input_precision="ieee")
    return narrow(product * tl.rsqrt(product.shape[1] * 1.0), DTYPE).to(tl.float32)


@triton.jit
def _layer_norm(row, channel, mask, mean, std, weight, bias):
    x = tl.load(row + channel, mask=mask, other=0.0)
    normed = tl.div_rn(x.to(tl.float32) - mean, std) * tl.load(weight + channel) + tl.load(bias + channel)
    return narrow(normed, x.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare(
    q,
    k,
    head_weights,
    norm_weight,
    norm_bias,
    cos_sin,
    positions,
    slots,
    pages,
    signs,
    q_values,
    weights,
    num_tokens,
    q_stride,
    k_stride,
    weight_stride,
    factor,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    UE8M0: tl.constexpr,
):
    program = tl.program_id(0)
    channel = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, ROPE // 2)[None, :]
    beyond = ROPE + tl.arange(0, WIDTH - ROPE)[None, :]
    dtype: tl.constexpr = q.dtype.element_ty
    operand: tl.constexpr = tl.float32 if INTERPRETED else dtype  # the interpreter's product knows no bfloat16
    # The rows of the signs that meet each part of a head. Loaded once, before any token.
    row = tl.arange(0, ROPE // 2)[:, None] * WIDTH
    top_signs = tl.load(signs + row + channel).to(operand)
    partner_signs = tl.load(signs + ROPE // 2 * WIDTH + row + channel).to(operand)
    rest_row = (ROPE + tl.arange(0, WIDTH - ROPE))[:, None] * WIDTH
    rest_signs = tl.load(signs + rest_row + channel).to(operand)
    blocks: tl.constexpr = HEADS // BLOCK  # 0 where only keys are stored
    at_least_one: tl.constexpr = blocks if blocks > 0 else 1
    query_programs = num_tokens * blocks
    if program < query_programs:
        heads = (program % at_least_one) * BLOCK + tl.arange(0, BLOCK)
        token = (program // at_least_one).to(tl.int64)
        q_angle = cos_sin + tl.load(positions + token) * ROPE + pair
        q_cos, q_sin = tl.load(q_angle), tl.load(q_angle + ROPE // 2)
        head = q + token * q_stride + heads[:, None] * WIDTH
        first, second = tl.load(head + pair), tl.load(head + ROPE // 2 + pair)
        rest = tl.load(head + beyond)
        query = _transform(first, second, rest, q_cos, q_sin, top_signs, partner_signs, rest_signs, dtype)
        q_scale = scale_of(tl.max(tl.abs(query), 1), UE8M0)
        value = to_e4m3(query, q_scale[:, None], UE8M0)
        tl.store(q_values + (token * HEADS + heads[:, None]) * WIDTH + channel, value)
        weight = tl.load(head_weights + token * weight_stride + heads)
        tl.store(weights + token * HEADS + heads, weight * q_scale * factor)
    else:
        tokens = ((program - query_programs) * KEYS + tl.arange(0, KEYS)).to(tl.int64)
        present = tokens < num_tokens
        mask = present[:, None]
        entry = k + tokens[:, None] * k_stride
        x = tl.load(entry + channel, mask=mask, other=0.0).to(tl.float32)
        mean = (tl.sum(x, 1) / WIDTH)[:, None]
        std = tl.sqrt_rn(tl.sum((x - mean) * (x - mean), 1) / WIDTH + eps)[:, None]
        normed = _layer_norm(entry, pair, mask, mean, std, norm_weight, norm_bias)
        partner = _layer_norm(entry, ROPE // 2 + pair, mask, mean, std, norm_weight, norm_bias)
        others = _layer_norm(entry, beyond, mask, mean, std, norm_weight, norm_bias)
        angle = cos_sin + tl.load(positions + tokens, mask=present, other=0)[:, None] * ROPE + pair
        cos, sin = tl.load(angle), tl.load(angle + ROPE // 2)
        key = _transform(normed, partner, others, cos, sin, top_signs, partner_signs, rest_signs, dtype)
        scale = scale_of(tl.max(tl.abs(key), 1), UE8M0)
        slot = tl.load(slots + tokens, mask=present, other=0)
        page = pages + (slot // 64) * (64 * (WIDTH + 4))
        offset = slot % 64
        k_value = to_e4m3(key, scale[:, None], UE8M0).to(tl.uint8, bitcast=True)
        tl.store(page[:, None] + offset[:, None] * WIDTH + channel, k_value, mask=mask)
        scale_page = (page + 64 * WIDTH).to(tl.pointer_type(tl.float32))
        tl.store(scale_page + offset, scale, mask=present)


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_queries(
    q,
    head_weights,
    cos_sin,
    positions,
    signs,
    q_values,
    weights,
    num_tokens,
    q_stride,
    weight_stride,
    factor,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    UE8M0: tl.constexpr,
):
    dtype: tl.constexpr = q.dtype.element_ty
    operand: tl.constexpr = tl.float32 if INTERPRETED else dtype
    heads = tl.arange(0, HEADS)
    channel = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, ROPE // 2)[None, :]
    beyond = ROPE + tl.arange(0, WIDTH - ROPE)[None, :]
    row = tl.arange(0, ROPE // 2)[:, None] * WIDTH
    top_signs = tl.load(signs + row + channel).to(operand)
    partner_signs = tl.load(signs + ROPE // 2 * WIDTH + row + channel).to(operand)
    rest_row = (ROPE + tl.arange(0, WIDTH - ROPE))[:, None] * WIDTH
    rest_signs = tl.load(signs + rest_row + channel).to(operand)
    place = heads[:, None] * WIDTH
    for turn in tl.range(0, TOKENS, num_stages=STAGES):
        # The last program does the last token again and again, which changes nothing and needs no masks.
        token = tl.minimum(tl.program_id(0) * TOKENS + turn, num_tokens - 1).to(tl.int64)
        angle = cos_sin + tl.load(positions + token) * ROPE + pair
        cos, sin = tl.load(angle), tl.load(angle + ROPE // 2)
        head = q + token * q_stride + place
        first, second = tl.load(head + pair), tl.load(head + ROPE // 2 + pair)
        rest = tl.load(head + beyond)
        query = _transform(first, second, rest, cos, sin, top_signs, partner_signs, rest_signs, dtype)
        scale = scale_of(tl.max(tl.abs(query), 1), UE8M0)
        tl.store(q_values + token * HEADS * WIDTH + place + channel, to_e4m3(query, scale[:, None], UE8M0))
        weight = tl.load(head_weights + token * weight_stride + heads)
        tl.store(weights + token * HEADS + heads, weight * scale * factor)


@functools.lru_cache(maxsize=8)
def _signs(width: int, device: torch.device) -> Tensor:
    """[N, N] bfloat16: Sylvester's matrix of +1 and -1."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device, torch.bfloat16)


def prepare(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.indexer_prep`."""
    num_tokens, heads, width = q.shape
    values = torch.empty(num_tokens, heads, width, dtype=torch.float8_e4m3fn, device=q.device)
    weights = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
    assert pages.is_contiguous()
    assert cos_sin.is_contiguous()
    assert q.stride(1) == width
    factor = (max(heads, 1) * width) ** -0.5
    together = heads
    if num_tokens > _MANY and heads and heads & (heads - 1) == 0:
        together = 0  # only the keys are left for the other kernel
        _prepare_queries[(triton.cdiv(num_tokens, _TOKENS),)](
            q,
            head_weights,
            cos_sin,
            positions,
            _signs(width, q.device),
            values,
            weights,
            num_tokens,
            q.stride(0),
            head_weights.stride(0),
            factor,
            HEADS=heads,
            TOKENS=_TOKENS,
            STAGES=_STAGES,
            WIDTH=width,
            ROPE=cos_sin.shape[1],
            UE8M0=scale_ue8m0,
            num_warps=_WARPS,
        )
    if num_tokens:
        block = 32 if together % 32 == 0 else 16
        grid = (num_tokens * (together // block) + triton.cdiv(num_tokens, _KEYS),)
        _prepare[grid](
            q,
            k,
            head_weights,
            norm_weight,
            norm_bias,
            cos_sin,
            positions,
            slots,
            pages,
            _signs(width, q.device),
            values,
            weights,
            num_tokens,
            q.stride(0),
            k.stride(0),
            head_weights.stride(0),
            factor,
            eps,
            HEADS=together,
            BLOCK=block,
            KEYS=_KEYS,
            WIDTH=width,
            ROPE=cos_sin.shape[1],
            UE8M0=scale_ue8m0,
            num_warps=8 if num_tokens <= 512 else 2,
        )
    return values, weights
