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


@triton.jit
def _count(expert_ids, counts, num_picks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    pick = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    picked = tl.load(expert_ids + pick, mask=pick < num_picks, other=0).to(tl.int32)
    found = tl.histogram(picked, EXPERTS, mask=pick < num_picks)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit
def _segments(
    counts,
    first_rows,
    expert_of_row,
    num_blocks,
    num_rows,
    EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    members = tl.arange(0, EXPERTS)
    block = tl.arange(0, BLOCK)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        entry = (start + block)[:, None] * EXPERTS + members[None, :]
        totals += tl.sum(tl.load(counts + entry, mask=(start + block < num_blocks)[:, None], other=0), 0)
    rows = (totals + SEGMENT - 1) // SEGMENT * SEGMENT
    first = tl.sum(tl.where(members < expert, rows, 0), 0)
    count = tl.sum(tl.where(members == expert, totals, 0), 0)
    # Where this expert's picks of each block of picks begin.
    row = first
    for start in range(0, num_blocks, BLOCK):
        present = start + block < num_blocks
        mine = tl.load(counts + (start + block) * EXPERTS + expert, mask=present, other=0)
        tl.store(first_rows + (start + block) * EXPERTS + expert, row + tl.cumsum(mine, 0) - mine, mask=present)
        row += tl.sum(mine, 0)
    segment = tl.arange(0, SEGMENT)
    for start in range(0, count, SEGMENT):
        tl.store(expert_of_row + first + start + segment, tl.where(start + segment < count, expert, -1))
    # Each expert clears a share of the rows that no segment reaches.
    for start in range(tl.sum(rows, 0) + expert * SEGMENT, num_rows, EXPERTS * SEGMENT):
        tl.store(expert_of_row + start + segment, tl.full((SEGMENT,), -1, tl.int32), mask=start + segment < num_rows)


@triton.jit
def _place(expert_ids, first_rows, places, num_picks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    present = first + lane < num_picks
    expert = tl.load(expert_ids + first + lane, mask=present, other=-1).to(tl.int32)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, BLOCK, PART):
        other_lane = start + tl.arange(0, PART)
        other = tl.load(expert_ids + first + other_lane, mask=first + other_lane < num_picks, other=-2).to(tl.int32)
        earlier = (other[None, :] == expert[:, None]) & (other_lane[None, :] < lane[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    base = tl.load(first_rows + tl.program_id(0) * EXPERTS + expert, mask=present, other=0)
    tl.store(places + first + lane, (base + rank).to(tl.int64), mask=present)


def segments(expert_ids: Tensor, *, num_experts: int, num_rows: int, segment: int) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.moe_permute`: counts by blocks of picks, sums over blocks, places."""
    num_picks, device, block = expert_ids.numel(), expert_ids.device, 512
    expert_ids = expert_ids.contiguous()
    places = torch.empty_like(expert_ids)
    expert_of_row = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_picks:
        num_blocks = triton.cdiv(num_picks, block)
        counts, first_rows = torch.empty(2, num_blocks, num_experts, dtype=torch.int32, device=device)
        sizes = {"EXPERTS": num_experts, "BLOCK": block}
        _count[(num_blocks,)](expert_ids, counts, num_picks, **sizes, num_warps=4)
        _segments[(num_experts,)](
            counts,
            first_rows,
            expert_of_row,
            num_blocks,
            num_rows,
            EXPERTS=num_experts,
            SEGMENT=segment,
            BLOCK=16,
            num_warps=4,
        )
        _place[(num_blocks,)](expert_ids, first_rows, places, num_picks, **sizes, PART=32, num_warps=8)
    return places, expert_of_row
