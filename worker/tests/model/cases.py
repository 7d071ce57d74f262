"""The random models that the equality tests run on, with what transformers computes for them. Built once a session."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers_model
from expectation import Computed
from reference_model import ReferenceModel
from tiny_models import OTHER_SHAPES, V3, V32, YARN, make_weights, random_ids
from torch import Tensor

# The selection is only defined up to rounding where the last score in and the first score out are this close.
MIN_GAP = 1e-5
# A magnitude of cos and sin other than 1.
MSCALE = {**YARN, "mscale": 0.707, "factor": 4}


@dataclass(frozen=True)
class Case:
    """`lengths`: of the sequences. Seeds are chosen so that no selection is near a tie."""

    config: dict[str, Any]
    seed: int
    lengths: tuple[int, ...] = (90, 33, 17, 70, 1)


CASES = {
    "v32": Case(V32, 1),
    "v32_other_shapes": Case({**V32, **OTHER_SHAPES, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 5}, 2),
    "v32_mscale": Case({**V32, "index_topk": 32, "rope_scaling": MSCALE, "max_position_embeddings": 16384}, 13),
    "v32_all_dense_layers": Case({**V32, "first_k_dense_replace": 3, "index_n_heads": 64, "index_head_dim": 24}, 4),
    "v32_selects_all": Case({**V32, "index_topk": 128}, 5),
    "v3": Case(V3, 6),
    "v3_without_query_latent": Case({**V3, "q_lora_rank": None, "tie_word_embeddings": True}, 7),
    "v3_other_shapes": Case({**V3, **OTHER_SHAPES}, 8),
}
SPARSE = [name for name in CASES if name.startswith("v32")]


@dataclass
class Prepared:
    """A case with its weights, sequences and expected values."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    sequences: list[Tensor]
    expected: list[Computed] = field(default_factory=list)


@functools.cache
def prepared(name: str) -> Prepared:
    """Values computed by transformers, one sequence at a time, each in one prefill."""
    case = CASES[name]
    weights = make_weights(case.config, case.seed)
    sequences = [random_ids(case.config, length, case.seed + i) for i, length in enumerate(case.lengths)]
    oracle = transformers_model.load(case.config, weights)
    return Prepared(case.config, weights, sequences, [transformers_model.prefill(oracle, ids) for ids in sequences])


def smallest_gap(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> float:
    """How far the last key in and the first key out are apart, over all layers and queries."""
    topk = config["index_topk"]
    gaps = [torch.inf]
    for layer in ReferenceModel(config, weights).forward(ids).layers:
        assert layer.index_scores is not None
        visible = torch.ones_like(layer.index_scores, dtype=torch.bool).tril()
        ranked = layer.index_scores.masked_fill(~visible, -torch.inf).sort(-1, descending=True).values[topk:]
        if ranked.shape[1] > topk and len(ranked):
            gaps.append((ranked[:, topk - 1] - ranked[:, topk]).min().item())
    return min(gaps)
