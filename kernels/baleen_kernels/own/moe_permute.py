"""Triton: where picks go, copies of tokens to there, and the weighted way back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import narrow


@triton.jit
def _boxes(
    expert_ids,
    places,
    counts,
    num_tokens,
    num_picks,
    room,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    if program < num_tokens:  # the picks of one token: how often each was picked before
        first = program * TOPK
        for column in tl.static_range(TOPK):
            expert = tl.load(expert_ids + first + column)
            rank = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, first, BLOCK):
                other = tl.load(expert_ids + start + block, mask=start + block < first, other=-1)
                rank += (other == expert).to(tl.int32)
            tl.store(places + first + column, expert * room + tl.sum(rank, 0))
    else:
        counted = program - num_tokens
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_picks, BLOCK):
            picked = tl.load(expert_ids + start + block, mask=start + block < num_picks, other=-1)
            count += (picked == counted).to(tl.int32)
        tl.store(counts + counted, tl.sum(count, 0))


def boxes(expert_ids: Tensor, *, num_experts: int, room: int) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.moe_permute`; for steps of few tokens, whose ids a block can read."""
    num_tokens, topk = expert_ids.shape
    expert_ids = expert_ids.contiguous()
    places = torch.empty_like(expert_ids)
    counts = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    _boxes[(num_tokens + num_experts,)](
        expert_ids,
        places,
        counts,
        num_tokens,
        num_tokens * topk,
        room,
        TOPK=topk,
        BLOCK=min(1024, max(32, triton.next_power_of_2(num_tokens * topk))),
        num_warps=2,
    )
    return places, counts


@triton.jit
def _scatter(
    values,
    scales,
    places,
    rows,
    row_scales,
    room,
    group_stride,
    token_stride,
    box_stride,
    padded_room,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    value = tl.load(values + token * WIDTH + column, mask=column < WIDTH, other=0)
    scale = tl.load(scales + token * token_stride + group * group_stride, mask=group < GROUPS, other=0.0)
    for pick in tl.static_range(TOPK):
        place = tl.load(places + token * TOPK + pick)
        tl.store(rows + place * WIDTH + column, value, mask=column < WIDTH)
        target = row_scales + (place // room) * box_stride + place % room
        tl.store(target + group * padded_room, scale, mask=group < GROUPS)


def scatter(values: Tensor, scales: Tensor, places: Tensor, *, num_boxes: int, room: int) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.moe_permute`."""
    num_tokens, width = values.shape
    groups, padded = scales.shape[1], -(-room // 4) * 4
    assert values.is_contiguous()
    rows = torch.empty(num_boxes, room, width, dtype=values.dtype, device=values.device)
    row_scales = torch.empty(num_boxes, groups, padded, dtype=torch.float32, device=values.device)
    if num_tokens:
        block = 1024
        _scatter[(num_tokens, triton.cdiv(width, block))](
            values.view(torch.uint8),
            scales,
            places,
            rows.view(torch.uint8),
            row_scales,
            room,
            scales.stride(1),
            scales.stride(0),
            groups * padded,
            padded,
            WIDTH=width,
            TOPK=places.shape[1],
            GROUPS=groups,
            BLOCK=block,
            num_warps=2,
        )
    return rows, row_scales.transpose(1, 2)[:, :room]


@triton.jit
def _combine(
    rows,
    places,
    weights,
    shared,
    out,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for pick in tl.static_range(TOPK):
        place = token * TOPK + pick
        if not IN_ORDER:
            place = tl.load(places + place)
        weight = tl.load(weights + token * TOPK + pick)
        total += weight * tl.load(rows + place * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(shared + token * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, narrow(total, out.dtype.element_ty), mask=mask)


def combine(rows: Tensor, places: Tensor | None, weights: Tensor, shared: Tensor) -> Tensor:
    """Contract and shapes as in `baleen_kernels.moe_permute`."""
    num_tokens, width = shared.shape
    assert rows.is_contiguous()
    assert shared.is_contiguous()
    out = torch.empty_like(shared)
    if num_tokens:
        block = 1024
        _combine[(num_tokens, triton.cdiv(width, block))](
            rows,
            weights if places is None else places,
            weights,
            shared,
            out,
            WIDTH=width,
            TOPK=weights.shape[1],
            IN_ORDER=places is None,
            BLOCK=block,
            num_warps=4,
        )
    return out
