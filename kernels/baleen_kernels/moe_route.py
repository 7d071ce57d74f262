"""Which experts a token goes to: sigmoid scores, group-limited choice, bias in the choice only.

s = sigmoid(logits); b = s + bias. Experts form `num_groups` consecutive groups; a group's score is the sum of its two
largest b. The `topk_groups` best groups stay, b of the rest becomes -inf (not 0: b may be negative). The `topk`
largest b are picked. Weights are the picks' s, without bias, divided by their sum + 1e-20 if `normalize`, times
`scaling_factor`.

Tie rule: among equal groups the lower group wins, among equal experts the **lower expert id wins**.

logits [T, E] float32, bias [E] float32 -> expert_ids [T, topk] int64, best first, weights [T, topk] float32.
ValueError if the groups do not divide the experts into at least two each, or the kept groups hold fewer than topk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`levels` > 0 rounds logits and bias, which makes ties."""

    name: str
    num_tokens: int
    num_experts: int
    num_groups: int
    topk_groups: int
    topk: int
    normalize: bool = True
    bias_mean: float = 0.0
    levels: int = 0


CASES = (
    Case("released", 20, 256, 8, 4, 8),
    Case("negative_bias", 40, 16, 4, 2, 4, bias_mean=-0.6),
    Case("one_group", 10, 8, 1, 1, 2),
    Case("not_normalized", 10, 8, 2, 1, 2, normalize=False),
    Case("ties", 40, 16, 4, 2, 4, levels=2),
    Case("all_equal", 3, 16, 4, 2, 4, levels=1),
    Case("whole_groups", 10, 8, 4, 2, 4, bias_mean=-1.5),
    Case("no_tokens", 0, 8, 2, 1, 2),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random logits and bias."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(case.num_tokens, case.num_experts, generator=g)
    bias = case.bias_mean + 0.15 * torch.randn(case.num_experts, generator=g)
    if case.levels:
        logits = torch.randint(0, case.levels, logits.shape, generator=g).float()
        bias = torch.zeros(case.num_experts)
    return {
        "logits": logits,
        "bias": bias,
        "num_groups": case.num_groups,
        "topk_groups": case.topk_groups,
        "topk": case.topk,
        "normalize": case.normalize,
        "scaling_factor": 2.5,
    }


def reference(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """The contract, token by token, with Python's stable sort."""
    num_experts = logits.shape[1]
    size = num_experts // num_groups
    ids = torch.empty(logits.shape[0], topk, dtype=torch.int64)
    weights = torch.empty(logits.shape[0], topk)
    scores = torch.sigmoid(logits)
    for token, choice in enumerate((scores + bias).tolist()):

        def group_score(group: int, choice: list[float] = choice) -> float:
            best, second = sorted(choice[group * size : (group + 1) * size], reverse=True)[:2]
            return float(torch.tensor(best) + torch.tensor(second))

        kept = sorted(range(num_groups), key=lambda group: (-group_score(group), group))[:topk_groups]
        experts = [expert for expert in range(num_experts) if expert // size in kept]
        picks = sorted(experts, key=lambda expert, choice=choice: (-choice[expert], expert))[:topk]
        chosen = scores[token, picks]
        ids[token] = torch.tensor(picks)
        weights[token] = (chosen / (chosen.sum() + 1e-20) if normalize else chosen) * scaling_factor
    return ids, weights


OP = Op("moe_route", reference, CASES, make_inputs, atol=1e-6)


@OP.backend("torch")
def _torch(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits)
    choice = (scores + bias).unflatten(1, (num_groups, -1))  # [T, G, E / G]
    group_scores = choice.topk(2, -1).values.sum(-1)  # [T, G]
    # A stable sort, where topk leaves the order of equals open.
    best_groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, False)
    choice = choice.masked_fill(dropped[..., None], -math.inf).flatten(1)  # [T, E]
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling_factor


def _rejects_triton(logits: Tensor, *, num_groups: int, **_: Any) -> str | None:
    size = logits.shape[1] // num_groups
    if num_groups & (num_groups - 1) or size & (size - 1):
        return f"{num_groups} groups of {size} experts are not powers of two"
    return None


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import moe_route as own

    return own.route(
        logits,
        bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        topk=topk,
        normalize=normalize,
        scaling_factor=scaling_factor,
    )


def moe_route(
    logits: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    num_experts = logits.shape[1]
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise ValueError(f"{num_experts} experts do not form {num_groups} equal groups of at least two")
    if not topk <= topk_groups * (num_experts // num_groups):
        raise ValueError(f"{topk_groups} groups of {num_experts // num_groups} experts hold fewer than {topk}")
    return OP.pick(backend)(
        logits,
        bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        topk=topk,
        normalize=normalize,
        scaling_factor=scaling_factor,
    )
