"""What a model computed for one sequence, in a form in which implementations can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from reference_model import Trace

TOLERANCE = 1e-4


@dataclass
class Computed:
    """Of one sequence of S tokens.

    logits: [S, V]. allowed: per layer [S, S] bool, keys that each query attended to.
    expert_ids, expert_weights: per MoE layer [S, k], ids ascending.
    """

    logits: Tensor
    allowed: list[Tensor]
    expert_ids: list[Tensor]
    expert_weights: list[Tensor]


def sorted_experts(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both [S, k] by ascending id."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


def from_trace(trace: Trace) -> Computed:
    """What the reference model computed."""
    experts = [
        sorted_experts(layer.expert_ids, layer.expert_weights)
        for layer in trace.layers
        if layer.expert_ids is not None and layer.expert_weights is not None
    ]
    return Computed(
        trace.logits,
        [layer.allowed for layer in trace.layers],
        [ids for ids, _ in experts],
        [weights for _, weights in experts],
    )


def assert_same(actual: Computed, expected: Computed, *, tolerance: float = TOLERANCE) -> None:
    """Identical key and expert picks, equal weights and logits."""
    assert len(actual.allowed) == len(expected.allowed)
    for layer, (got, want) in enumerate(zip(actual.allowed, expected.allowed, strict=True)):
        wrong = (got != want).any(-1).nonzero()[:, 0].tolist()
        assert not wrong, f"layer {layer}: other keys selected by queries {wrong}"
    assert len(actual.expert_ids) == len(expected.expert_ids)
    for layer, (got, want) in enumerate(zip(actual.expert_ids, expected.expert_ids, strict=True)):
        wrong = (got != want).any(-1).nonzero()[:, 0].tolist()
        assert not wrong, f"MoE layer {layer}: other experts for tokens {wrong}"
    for got, want in zip(actual.expert_weights, expected.expert_weights, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
    torch.testing.assert_close(actual.logits, expected.logits, atol=tolerance, rtol=0)
