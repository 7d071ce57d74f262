"""transformers' implementation as an oracle: float32, eager attention, weights read from a checkpoint directory."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from expectation import Computed, sorted_experts
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def load(config: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The model that transformers makes of a checkpoint in the released layout."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> Computed:
    """Computes a whole sequence [S] at once."""
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    allowed: list[Tensor] = []
    experts: list[tuple[Tensor, Tensor]] = []

    def on_indexer(_module: Any, _args: Any, output: Tensor) -> None:
        allowed.append(torch.zeros_like(causal).scatter_(1, output[0].long(), True) & causal)

    def on_gate(_module: Any, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        experts.append(sorted_experts(output[2], output[1]))

    hooks = []
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "indexer"):
            hooks.append(layer.self_attn.indexer.register_forward_hook(on_indexer))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(on_gate))
    logits = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return Computed(
        logits,
        allowed or [causal] * len(model.model.layers),
        [ids for ids, _ in experts],
        [weights for _, weights in experts],
    )


@torch.no_grad()
def decode(model: Any, ids: Tensor, num_prefill: int) -> Tensor:
    """Logits [S, V] of a prefill of `num_prefill` tokens and then one token at a time through its cache."""
    result = model(ids[None, :num_prefill], use_cache=True)
    logits = [result.logits[0]]
    for position in range(num_prefill, len(ids)):
        result = model(ids[None, position : position + 1], past_key_values=result.past_key_values, use_cache=True)
        logits.append(result.logits[0])
    return torch.cat(logits)


@contextlib.contextmanager
def lower_index_wins_ties() -> Iterator[None]:
    """Gives torch.topk a defined order among equals while it is active: a stable descending sort."""

    def stable_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        assert largest
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch, "topk", stable_topk), mock.patch.object(torch.Tensor, "topk", stable_topk):
        yield
