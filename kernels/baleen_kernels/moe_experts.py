"""Sends tokens to their experts and adds what comes back.

out[t] = sum_k expert_weights[t, k] * expert(expert_ids[t, k], x[t])

x [T, N] float32 or bfloat16; expert_ids [T, k] int64, no id twice in a row; expert_weights [T, k] float32;
`expert(e, rows [m, N]) -> [m, N]` computes one expert's feed-forward on the rows given to it -> [T, N] float32.
An expert that no token picked is not called. Each token's sum runs over its experts in ascending id, in float32, so it
does not depend on the token's neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op

Expert = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_experts: int
    topk: int


CASES = (Case("spread", 20, 8, 3), Case("one_token", 1, 8, 3), Case("all_experts", 5, 4, 4), Case("no_tokens", 0, 4, 2))


def make_inputs(case: Case) -> dict[str, Any]:
    """Random tokens, distinct experts per token; an expert is a random square matrix."""
    g = torch.Generator().manual_seed(0)
    width = 12
    matrices = torch.randn(case.num_experts, width, width, generator=g)
    return {
        "x": torch.randn(case.num_tokens, width, generator=g),
        "expert_ids": torch.rand(case.num_tokens, case.num_experts, generator=g).argsort(-1)[:, : case.topk],
        "expert_weights": torch.rand(case.num_tokens, case.topk, generator=g),
        "expert": lambda e, rows: rows @ matrices[e].to(rows.device),
    }


def reference(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, expert: Expert) -> Tensor:
    """The contract, pair by pair."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        for column in expert_ids[token].argsort().tolist():
            result = expert(int(expert_ids[token, column]), x[token : token + 1])[0]
            out[token] += expert_weights[token, column] * result.float()
    return out


OP = Op("moe_experts", reference, CASES, make_inputs, atol=1e-4)


@OP.backend("torch")
def _torch(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, expert: Expert) -> Tensor:
    topk = expert_ids.shape[1]
    flat_ids, order = expert_ids.flatten().sort(stable=True)  # pairs by expert, tokens ascending within one
    tokens, weights = order // topk, expert_weights.flatten()[order]
    experts, counts = flat_ids.unique_consecutive(return_counts=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for e, count in zip(experts.tolist(), counts.tolist(), strict=True):
        rows = tokens[start : start + count]
        # A token picks an expert once, so no row occurs twice and the order of addition is fixed.
        out.index_add_(0, rows, expert(e, x[rows]).float() * weights[start : start + count, None])
        start += count
    return out


def moe_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, expert: Expert, *, backend: str = "torch"
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(x, expert_ids, expert_weights, expert)
