"""Training's modules and the worker's compute the same logits: to rounding in float64, to 1e-4 in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from baleen_eval.texts.examples import examples
from baleen_worker.model.context import ForwardContext, ForwardRow
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.numerics import Numerics
from baleen_worker.model.rope import rotary_frequencies
from baleen_worker.model_config import load_model_config
from baleen_worker.weights import load_weights
from tokenizers import Tokenizer
from torch import Tensor

from models.data.mixture import Encoder
from models.train.attention import Mode, Pass
from models.train.checkpoint import load_official, new_model
from models.train.layers import Linear
from models.train.model import MicroModel
from models.train.rotary import table

MICRO = Path(__file__).parents[1] / "micro"
PAGE_SIZE = 64


class PlainPools:
    """`KvPools` that keep what they are given in its own dtype."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._stores: dict[tuple[str, int], Tensor] = {}

    def _write(self, name: str, layer: int, kv_slots: Tensor, values: Tensor) -> None:
        empty = values.new_zeros(self._num_slots, values.shape[1])
        self._stores.setdefault((name, layer), empty)[kv_slots] = values

    def write_latent(self, layer: int, kv_slots: Tensor, kv_latent: Tensor, k_rope: Tensor) -> None:
        self._write("latent", layer, kv_slots, kv_latent)
        self._write("rope", layer, kv_slots, k_rope)

    def read_latent(self, layer: int, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._stores["latent", layer][kv_slots], self._stores["rope", layer][kv_slots]

    def write_index_k(self, layer: int, kv_slots: Tensor, index_k: Tensor) -> None:
        self._write("index", layer, kv_slots, index_k)

    def read_index_k(self, layer: int, kv_slots: Tensor) -> Tensor:
        return self._stores["index", layer][kv_slots]


@contextmanager
def in_float64() -> Iterator[None]:
    """While open, whatever either side's code calls float32 is float64."""
    with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(torch, "float32", torch.float64):
        yield


@torch.no_grad()
def worker_logits(model: DeepseekForCausalLM, ids: Tensor) -> Tensor:
    """ids [T] -> logits [T, vocab]."""
    num_pages = -(-len(ids) // PAGE_SIZE)
    positions = torch.arange(len(ids))
    row = ForwardRow(0, len(ids), len(ids), torch.arange(1, num_pages + 1), is_prefill=True)
    context = ForwardContext(positions, positions + PAGE_SIZE, [row], PAGE_SIZE)
    return model.compute_logits(model(ids, context, PlainPools((num_pages + 1) * PAGE_SIZE)))


@torch.no_grad()
def train_logits(model: MicroModel, ids: Tensor, mode: Mode, pattern: str = "") -> Tensor:
    """ids [T] -> logits [T, vocab]."""
    cos, sin = table(model.config, len(ids), ids.device)
    return model.logits(model(ids[None], Pass(mode, cos, sin, pattern=pattern))[0])[0]


@pytest.fixture
def ids() -> Tensor:
    """A text longer than the selection."""
    tokenizer = Tokenizer.from_file(str(MICRO / "tokenizer.json"))
    conversation = next(examples("needle", 1, seed=5, lengths=(512,)))
    encoded = torch.tensor(Encoder(tokenizer)(conversation)[0])
    assert len(encoded) > load_model_config(MICRO).index_topk
    return encoded


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> MicroModel:
    monkeypatch.setattr(Linear, "round_weights", False)  # those of the file are rounded already
    model = new_model().eval()
    load_official(model, MICRO)
    return model


def serving(overrides: str = "") -> DeepseekForCausalLM:
    """The worker's model; `overrides` as of `load_model_config`."""
    config, numerics = load_model_config(MICRO, overrides), Numerics.for_dtype(torch.float32)
    with torch.device("meta"):
        model = DeepseekForCausalLM(config, numerics)
    load_weights(model, MICRO, config, device=torch.device("cpu"))
    return model


@pytest.fixture
def served() -> DeepseekForCausalLM:
    return serving()


def widen(trained: MicroModel, served: DeepseekForCausalLM) -> None:
    """Both models to float64, inside `in_float64`."""
    trained.double().dtype = torch.float64
    served.double().frequencies = rotary_frequencies(
        served.config.qk_rope_head_dim, served.config.rope_theta, served.config.rope_scaling
    )
    for module in served.modules():
        if hasattr(module, "numerics"):
            vars(module)["numerics"] = dataclasses.replace(served.numerics, dtype=torch.float64)


def amplification(model: MicroModel, ids: Tensor) -> Tensor:
    """How much of a relative error in the embeddings arrives in the logits of each position [T]; in float64."""
    before = train_logits(model, ids, Mode.SPARSE)
    embedding, relative = model.model.embed_tokens.weight, 2.0**-30
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    embedding.data.mul_(1.0 + relative * noise)
    return (train_logits(model, ids, Mode.SPARSE) - before).abs().amax(-1) / relative


def test_both_sides_are_the_same_function(trained: MicroModel, served: DeepseekForCausalLM, ids: Tensor) -> None:
    with in_float64():
        widen(trained, served)
        expected = worker_logits(served, ids)
        assert expected.dtype == torch.float64
        assert (train_logits(trained, ids, Mode.SPARSE) - expected).abs().max() < 1e-9
        # The comparison sees the selection.
        assert (train_logits(trained, ids, Mode.DENSE) - expected).abs().max() > 1e-3


def test_both_sides_share_selections_alike(trained: MicroModel, ids: Tensor) -> None:
    served = serving('{"index_topk_pattern": "FSF"}')
    with in_float64():
        widen(trained, served)
        expected = worker_logits(served, ids)
        assert (train_logits(trained, ids, Mode.SPARSE, "FSF") - expected).abs().max() < 1e-9
        # The comparison sees whose selection it is.
        assert (train_logits(trained, ids, Mode.SPARSE) - expected).abs().max() > 1e-6


def test_float32_differs_by_rounding_only(trained: MicroModel, served: DeepseekForCausalLM, ids: Tensor) -> None:
    """Within 1e-4 wherever the model does not magnify rounding by more than 100; elsewhere the test above speaks."""
    apart = (train_logits(trained, ids, Mode.SPARSE) - worker_logits(served, ids)).abs().amax(-1)
    with in_float64():
        widen(trained, served)
        well_conditioned = amplification(trained, ids) < 100.0
    assert well_conditioned.double().mean() > 0.98
    assert apart[well_conditioned].max() < 1e-4
