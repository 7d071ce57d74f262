"""The equality checks can fail: each mistake that is easily made in this model, put into the product, is noticed.

A mistake replaces one seam of the product. The unchanged product passes the same check in the first test.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import baleen_kernels.hadamard
import baleen_kernels.index_logits
import baleen_kernels.index_topk
import baleen_kernels.layer_norm
import baleen_kernels.moe_route
import baleen_kernels.rope
import pytest
import torch
from baleen_worker.model import attention, indexer, linear, moe, rope
from cases import prepared
from expectation import assert_same, from_trace
from product import build
from reference_model import ReferenceModel
from stepper import Stepper, in_chunks, whole
from tiny_models import V32, make_weights, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _check() -> None:
    """A prompt at once and in chunks with decode, against transformers' values; then a model full of ties."""
    case = prepared("v32")
    ids, expected = case.sequences[0], case.expected[0]
    model = build(case.config, case.weights)
    for schedule in (whole(len(ids)), in_chunks(len(ids), [30, 20, 9, 1])):
        assert_same(Stepper(model, [ids], [60]).run(schedule)[0], expected)
    config, weights, ids = _tied()
    expected = from_trace(ReferenceModel(config, weights).forward(ids))
    assert_same(Stepper(build(config, weights), [ids], [60]).run(in_chunks(len(ids), [50, 9, 1]))[0], expected)


@functools.cache
def _tied() -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    config = {**V32, "index_n_heads": 1, "index_topk": 24}
    return config, make_weights(config, 11), random_ids(config, 80, 11)


def _index_rope_interleaved(patch: pytest.MonkeyPatch) -> None:
    def mistaken(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool) -> Tensor:
        return baleen_kernels.rope.rope(x, cos, sin, rope_interleaved=not rope_interleaved)

    patch.setattr(indexer, "rope", mistaken)


def _index_rope_on_last_channels(patch: pytest.MonkeyPatch) -> None:
    def mistaken(self: indexer.Indexer, x: Tensor, rotary: rope.RotaryTable) -> Tensor:
        rest, last = x.split([self.head_dim - self.rope_dim, self.rope_dim], -1)
        return torch.cat([rest, baleen_kernels.rope.rope(last, rotary.cos, rotary.sin, rope_interleaved=False)], -1)

    patch.setattr(indexer.Indexer, "_rotate", mistaken)


def _main_rope_half_split(patch: pytest.MonkeyPatch) -> None:
    def mistaken(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool) -> Tensor:
        return baleen_kernels.rope.rope(x, cos, sin, rope_interleaved=not rope_interleaved)

    patch.setattr(attention, "rope", mistaken)


def _key_norm_without_bias(patch: pytest.MonkeyPatch) -> None:
    def mistaken(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return baleen_kernels.layer_norm.layer_norm(x, weight, torch.zeros_like(bias), eps=eps)

    patch.setattr(linear, "layer_norm", mistaken)


def _key_norm_without_mean(patch: pytest.MonkeyPatch) -> None:
    def mistaken(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight + bias

    patch.setattr(linear, "layer_norm", mistaken)


def _relu_after_head_weights(patch: pytest.MonkeyPatch) -> None:
    def mistaken(q: Tensor, k: Tensor, head_weights: Tensor) -> Tensor:
        return torch.einsum("btj,btjd,bsd->bts", head_weights, q, k).relu()

    patch.setattr(indexer, "index_logits", mistaken)


def _no_relu(patch: pytest.MonkeyPatch) -> None:
    def mistaken(q: Tensor, k: Tensor, head_weights: Tensor) -> Tensor:
        return torch.einsum("btj,btjd,bsd->bts", head_weights, q, k)

    patch.setattr(indexer, "index_logits", mistaken)


def _negative_head_weights_cut(patch: pytest.MonkeyPatch) -> None:
    def mistaken(q: Tensor, k: Tensor, head_weights: Tensor) -> Tensor:
        return baleen_kernels.index_logits.index_logits(q, k, head_weights.relu())

    patch.setattr(indexer, "index_logits", mistaken)


def _mask_only_after_topk(patch: pytest.MonkeyPatch) -> None:
    def mistaken(scores: Tensor, lengths: Tensor, *, topk: int) -> Tensor:
        everything = torch.full_like(lengths, scores.shape[1])
        picks = baleen_kernels.index_topk.index_topk(scores, everything, topk=topk)
        return torch.where(picks < lengths[:, None], picks, -1)

    patch.setattr(indexer, "index_topk", mistaken)


def _mask_only_before_topk(patch: pytest.MonkeyPatch) -> None:
    def mistaken(scores: Tensor, lengths: Tensor, *, topk: int) -> Tensor:
        return baleen_kernels.index_topk.index_topk(scores, lengths.clamp(min=topk), topk=topk)

    patch.setattr(indexer, "index_topk", mistaken)


def _higher_position_wins_ties(patch: pytest.MonkeyPatch) -> None:
    def mistaken(scores: Tensor, lengths: Tensor, *, topk: int) -> Tensor:
        out = torch.full((len(scores), topk), -1, dtype=torch.int32)
        for row, length in enumerate(lengths.tolist()):
            order = scores[row, :length].flip(0).sort(descending=True, stable=True).indices[:topk]
            out[row, : len(order)] = length - 1 - order
        return out

    patch.setattr(indexer, "index_topk", mistaken)


def _dropped_groups_to_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(baleen_kernels.moe_route, "math", SimpleNamespace(inf=0.0))


def _bias_in_expert_weights(patch: pytest.MonkeyPatch) -> None:
    def mistaken(logits: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        ids, _ = baleen_kernels.moe_route.moe_route(logits, bias, **options)
        weights = (logits.sigmoid() + bias).gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * options["scaling_factor"]

    patch.setattr(moe, "moe_route", mistaken)


def _mscale_not_squared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rope, "yarn_mscale", lambda factor, mscale: math.sqrt(0.1 * mscale * math.log(factor) + 1))


def _latent_not_normed(patch: pytest.MonkeyPatch) -> None:
    def mistaken(self: indexer.Indexer, x: Tensor, q_latent: Tensor, *rest: Any) -> Tensor:
        return forward(self, x, 1.5 * q_latent + 0.1, *rest)

    forward = indexer.Indexer.forward
    patch.setattr(indexer.Indexer, "forward", mistaken)


MISTAKES = [
    _index_rope_interleaved,
    _index_rope_on_last_channels,
    _main_rope_half_split,
    _key_norm_without_bias,
    _key_norm_without_mean,
    _relu_after_head_weights,
    _no_relu,
    _negative_head_weights_cut,
    _mask_only_after_topk,
    _mask_only_before_topk,
    _higher_position_wins_ties,
    _dropped_groups_to_zero,
    _bias_in_expert_weights,
    _mscale_not_squared,
    _latent_not_normed,
]


def test_the_unchanged_product_passes() -> None:
    _check()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_mistake_is_noticed(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        _check()
