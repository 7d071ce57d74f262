"""Layers that reuse the selection of the layer before them (IndexCache), against the plain reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from baleen_worker.cache.storage import choose_layout
from baleen_worker.json_keys import CheckpointError
from baleen_worker.model_config import load_model_config
from product import build, model_config
from reference_model import ReferenceModel
from stepper import Schedule, Stepper, garbage_pools
from tiny_models import V32, make_weights, random_ids

LENGTHS = (3, 40, 90)
BASE: dict[str, Any] = {**V32, "num_hidden_layers": 6, "first_k_dense_replace": 1}


def with_pattern(pattern: str) -> dict[str, Any]:
    return {**BASE, "index_topk_pattern": pattern}


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a checkpoint that has no indexer where none is used."""
    layers = model_config(config).index_layers
    return {
        name: tensor
        for name, tensor in make_weights(config, seed=5).items()
        if ".indexer." not in name or layers[int(name.split(".")[2])]
    }


@pytest.mark.parametrize("pattern", ["FSFSFS", "FSSSSS", "FFSSF", "FFFFFF"])
@pytest.mark.parametrize("schedule", ["whole", "chunks", "decode"])
def test_equals_the_reference(pattern: str, schedule: str) -> None:
    config = with_pattern(pattern)
    weights = weights_of(config)
    model, reference = build(config, weights), ReferenceModel(config, weights)
    sequences = [random_ids(config, length, seed) for seed, length in enumerate(LENGTHS)]
    steps = {"whole": [list(enumerate(LENGTHS))], "chunks": pieces(16), "decode": pieces(1)}[schedule]
    prompt_lens = [1] * len(LENGTHS) if schedule == "decode" else None
    for ids, computed in zip(sequences, Stepper(model, sequences, prompt_lens).run(steps), strict=True):
        torch.testing.assert_close(computed.logits, reference.forward(ids).logits, atol=1e-4, rtol=0)


def pieces(size: int) -> Schedule:
    """So many tokens of every sequence that is not done in each step."""
    return [
        [(sequence, min(size, length - start)) for sequence, length in enumerate(LENGTHS) if start < length]
        for start in range(0, max(LENGTHS), size)
    ]


def test_reuse_changes_the_answer() -> None:
    """Else nothing above would show that layers reuse anything."""
    weights = make_weights(BASE, seed=5)
    ids = random_ids(BASE, 90, seed=1)
    full = ReferenceModel(BASE, weights).forward(ids).logits
    reused = ReferenceModel(with_pattern("FSSSSS"), weights).forward(ids).logits
    assert (full - reused).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 1}, "FFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_pattern": "FS"}, "FSFFFF"),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]}, "FSSFSF"),
    ],
)
def test_which_layers_have_an_indexer(keys: dict[str, Any], layers: str) -> None:
    config = model_config({**BASE, **keys})
    assert "".join("F" if owns else "S" for owns in config.index_layers) == layers


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"index_topk_pattern": "SF"}, "index_topk_pattern leaves the first layer without a selection"),
        ({"index_topk_pattern": "FSX"}, 'index_topk_pattern must be letters "F" or "S"'),
        ({"index_topk_pattern": "F" * 7}, "at most one for each of 6 layers"),
        ({"index_topk_freq": 0}, "index_topk_freq must be a whole number of at least 1"),
        ({"indexer_types": ["full"]}, "indexer_types must list"),
    ],
)
def test_a_wrong_choice_of_layers_is_named(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        model_config({**BASE, **keys})


def test_reusing_layers_keep_no_index_keys() -> None:
    config = model_config(with_pattern("FSSFSS"))
    layout = choose_layout(config, dtype=torch.float32, kv_cache_dtype="auto", index_hadamard=True)
    plain = choose_layout(model_config(BASE), dtype=torch.float32, kv_cache_dtype="auto", index_hadamard=True)
    assert plain.bytes_per_token - layout.bytes_per_token == 4 * layout.index_bytes
    assert "layers=6:FSSFSS" in layout.layout_id
    assert "layers=6;" in plain.layout_id
    model = build(with_pattern("FSSFSS"), weights_of(with_pattern("FSSFSS")))
    pools = garbage_pools(model, 3)
    assert [pools.page_bytes(layer, 1)[1] is not None for layer in range(6)] == [True, False, False, True, False, False]
    held = [part.numel() for layer in range(6) for part in pools.page_bytes(layer, 1) if part is not None]
    assert sum(held) == layout.bytes_per_page


def test_keys_of_the_config_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    overrides = '{"index_topk_freq": 4}'
    plain, overridden = load_model_config(tmp_path), load_model_config(tmp_path, overrides)
    assert overridden.index_layers == (True, True, False, False, False, True)
    assert plain.config_digest != overridden.config_digest
    with pytest.raises(CheckpointError, match="--json-model-override-args is not valid JSON"):
        load_model_config(tmp_path, "{")
