"""The fused model against the plain one with the same roundings, on the same pools, PyTorch backends in float32.

Both read what they store, so they agree to rounding until an FP8 number flips; the golden values of the deployed
arithmetic hold the plain one (`test_golden`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from baleen_kernels import machine, selection
from baleen_worker.cache.storage import FLOAT32, FP8, KvLayout, PagedPools
from baleen_worker.model.attention_plan import AttentionForm
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.fused import experts
from baleen_worker.model.fused import model as fused_model
from baleen_worker.model.fused.model import FusedModel
from baleen_worker.model.fused.ops import FusedOps
from baleen_worker.model.numerics import Numerics
from product import build, model_config
from safetensors.torch import load_file
from stepper import Schedule, Stepper, in_chunks, whole
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden" / "v32_fp8"
DEPLOYED = dataclasses.replace(
    Numerics.for_dtype(torch.float32), index_hadamard=True, index_q_fp8=True, linear_input_fp8=True
)
OPS = FusedOps.of(selection.select(machine.describe("cpu")))
LATENTS = pytest.mark.parametrize("latents", [FLOAT32, FP8])


def _config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


def _plain(form: AttentionForm = AttentionForm.AUTO, **overrides: Any) -> DeepseekForCausalLM:
    config = _config() | overrides
    weights = load_file(FOLDER / "model.safetensors")
    parsed = model_config(config)
    unused = [
        name
        for name in weights
        if ".indexer." in name and not parsed.index_layers[int(name.split("layers.")[1].split(".")[0])]
    ]
    kept = {name: weight for name, weight in weights.items() if name not in unused}
    return build(config, kept, numerics=DEPLOYED, keep_fp8=True, attention_form=form)


def _plain_on(latents: str, **overrides: Any) -> DeepseekForCausalLM:
    """The plain model rounds latents before it expands them, which changes nothing only where they are FP8 already."""
    return _plain(AttentionForm.AUTO if latents == FP8 else AttentionForm.ABSORBED, **overrides)


def _fused(**overrides: Any) -> FusedModel:
    return FusedModel(_plain(**overrides), OPS, max_positions=400, device=torch.device("cpu"))


def _pools(model: Any, num_pages: int, latents: str) -> PagedPools:
    config = model.config
    layout = KvLayout(
        num_layers=config.num_hidden_layers,
        index_layers=config.index_layers,
        latent_dim=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        index_dim=config.index_head_dim,
        latent_format=latents,
        index_format=FP8,
        index_hadamard=True,
        model_digest="",
    )
    return PagedPools(layout, num_pages, device=torch.device("cpu"), dtype=torch.float32)


def _ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def _logits(model: Any, sequences: list[Tensor], prompts: list[int], schedule: Schedule, latents: str) -> Tensor:
    num_pages = 1 + sum(-(-len(ids) // 64) for ids in sequences)
    stepper = Stepper(model, sequences, prompts, _pools(model, num_pages, latents))
    for rows in schedule:
        stepper.step(rows)
    return torch.cat(stepper.logits)


def _assert_near(found: Tensor, expected: Tensor) -> None:
    """Sums in another order round an FP8 number the other way now and then, which can change a pick and so a row."""
    assert found.isfinite().all()
    error = (found - expected).abs().amax(-1)
    assert (error < 1e-3).float().mean() > 0.9, error


MIXED: Schedule = [[(0, 30)], [(0, 50), (1, 70)], [(1, 1), (0, 1), (2, 20)], [(2, 1), (1, 40), (0, 39)], [(2, 79)]]
SCHEDULES: dict[str, tuple[list[int], Schedule]] = {
    "whole": ([120], whole(120)),
    "two_prompts": ([90, 120], whole(90, 120)),
    "chunks": ([150], in_chunks(150, [64])),
    "decode": ([100], in_chunks(100, [64, 20, 1])),
    "short": ([15], in_chunks(15, [8, 1])),
    "up_to_the_selection": ([40], in_chunks(40, [15, 1])),
    "mixed": ([120, 111, 100], MIXED),
}


@LATENTS
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_computes_what_the_plain_model_does(name: str, latents: str) -> None:
    lengths, schedule = SCHEDULES[name]
    sequences = [_ids(length, seed) for seed, length in enumerate(lengths)]
    expected = _logits(_plain_on(latents), sequences, [200] * len(lengths), schedule, latents)
    found = _logits(_fused(), sequences, [200] * len(lengths), schedule, latents)
    _assert_near(found, expected)


@LATENTS
def test_layers_without_an_indexer_reuse_the_selection(latents: str) -> None:
    sequences = [_ids(100), _ids(60, 1)]
    schedule: Schedule = [[(0, 99), (1, 59)], [(0, 1), (1, 1)]]
    options = {"index_topk_pattern": "FS"}
    expected = _logits(_plain_on(latents, **options), sequences, [99, 59], schedule, latents)
    _assert_near(_logits(_fused(**options), sequences, [99, 59], schedule, latents), expected)
    without = _logits(_fused(), sequences, [99, 59], schedule, latents)
    assert (without - expected).abs().max() > 0.1


def test_both_shapes_of_the_experts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [_ids(100)]
    tiled = _logits(_fused(), sequences, [100], whole(100), FLOAT32)
    monkeypatch.setattr(experts, "MOST_TILED", 0)
    segmented = _logits(_fused(), sequences, [100], whole(100), FLOAT32)
    _assert_near(segmented, tiled)


def test_scores_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from baleen_worker.model.fused import attention

    sequences = [_ids(150)]
    at_once = _logits(_fused(), sequences, [150], whole(150), FLOAT32)
    monkeypatch.setattr(attention, "_MAX_SCORE_BYTES", 4 * 192 * 7)
    torch.testing.assert_close(_logits(_fused(), sequences, [150], whole(150), FLOAT32), at_once, atol=1e-4, rtol=0)


def test_uniform_routing_spreads_tokens_evenly() -> None:
    uniform = experts.UniformRouting(7, 256, torch.device("cpu"))

    class Step:
        routing = None
        kv_slots = 64 + torch.arange(128) * 4096 + 5

    picks = uniform.logits(3, Step()).topk(8).indices  # type: ignore[arg-type]
    active = picks.unique().numel()
    assert 240 < active <= 256  # of evenly drawn picks 98 % of the experts have one
    assert not torch.equal(picks, uniform.logits(4, Step()).topk(8).indices)  # type: ignore[arg-type]


def test_uniform_routing_lets_rows_on_pages_anywhere_pick_apart() -> None:
    uniform = experts.UniformRouting(1, 64, torch.device("cpu"))

    class Step:
        routing = None
        kv_slots = 64 * torch.randperm(90_000, generator=torch.Generator().manual_seed(0))[:64] + 5

    assert uniform.logits(0, Step()).unique(dim=0).shape[0] == 64  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"quantization_config": None}, "not block FP8"),
        ({"tie_word_embeddings": True}, "tied to the embedding"),
        ({"moe_intermediate_size": 96}, "moe_intermediate_size, 96, is no multiple of 128"),
        ({"index_head_dim": 64}, "index keys of 128"),
    ],
)
def test_models_that_it_does_not_take_are_named(overrides: dict[str, Any], reason: str) -> None:
    assert fused_model.why_not(model_config(_config())) is None
    assert reason in (fused_model.why_not(model_config(_config() | overrides)) or "")
