"""Triton: the router, one program a token, its experts as a matrix of groups in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(
    logits,
    bias,
    expert_ids,
    weights,
    row_stride,
    scaling_factor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    score = tl.sigmoid(tl.load(logits + row * row_stride + expert))
    choice = score + tl.load(bias + expert)
    best, place = tl.max(choice, 1, return_indices=True)
    second = tl.max(tl.where(member[None, :] == place[:, None], float("-inf"), choice), 1)
    group_score = best + second
    kept = tl.zeros((GROUPS,), tl.int1)
    for _ in tl.static_range(TOPK_GROUPS):
        winner = tl.argmax(tl.where(kept, float("-inf"), group_score), 0, tie_break_left=True)
        kept = kept | (group == winner)
    choice = tl.reshape(tl.where(kept[:, None], choice, float("-inf")), (GROUPS * SIZE,))
    score = tl.reshape(score, (GROUPS * SIZE,))
    expert = tl.arange(0, GROUPS * SIZE)
    slot = tl.arange(0, TOPK_PADDED)
    picked = tl.zeros((TOPK_PADDED,), tl.int64)
    picked_score = tl.zeros((TOPK_PADDED,), tl.float32)
    for k in tl.static_range(TOPK):
        winner = tl.argmax(choice, 0, tie_break_left=True)
        own_score = tl.sum(tl.where(expert == winner, score, 0.0), 0)
        picked = tl.where(slot == k, winner.to(tl.int64), picked)
        picked_score = tl.where(slot == k, own_score, picked_score)
        choice = tl.where(expert == winner, float("-inf"), choice)
    if NORMALIZE:
        picked_score = tl.div_rn(picked_score, tl.sum(picked_score, 0) + 1e-20)
    tl.store(expert_ids + row * TOPK + slot, picked, mask=slot < TOPK)
    tl.store(weights + row * TOPK + slot, picked_score * scaling_factor, mask=slot < TOPK)


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.moe_route`."""
    num_tokens, num_experts = logits.shape
    expert_ids = torch.empty(num_tokens, topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, topk, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            bias,
            expert_ids,
            weights,
            logits.stride(0),
            scaling_factor,
            GROUPS=num_groups,
            SIZE=num_experts // num_groups,
            TOPK_GROUPS=topk_groups,
            TOPK=topk,
            TOPK_PADDED=triton.next_power_of_2(topk),
            NORMALIZE=normalize,
            num_warps=1,
        )
    return expert_ids, weights
