"""What config.json may say, in either spelling, and the sentence for each thing it may not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from baleen_worker.json_keys import CheckpointError
from baleen_worker.model_config import BlockQuantization, ModelConfig, RopeScaling, load_model_config
from tiny_checkpoint import SIZES, Tiny, read_config

if TYPE_CHECKING:
    from collections.abc import Callable

MICRO = Path(__file__).parents[3] / "models" / "micro"
DELETED = object()


def load(folder: Path, config: Any, generation: Any = None) -> ModelConfig:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), "utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return load_model_config(folder)


def changed(**changes: Any) -> dict[str, Any]:
    """The micro model's config with other values."""
    config = read_config(MICRO) | changes
    return {key: value for key, value in config.items() if value is not DELETED}


def test_released_spelling() -> None:
    config = load_model_config(MICRO)
    assert config.has_indexer
    assert (config.kv_lora_rank, config.index_topk, config.num_nextn_predict_layers) == (512, 256, 1)
    assert config.rope_scaling == RopeScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.quantization_config == BlockQuantization((128, 128), "ue8m0")
    assert config.moe_layers == (False, True, True)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", 0, (1,))
    assert config.config_digest == hashlib.sha256((MICRO / "config.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v3"])
def test_written_by_transformers(name: str, request: pytest.FixtureRequest) -> None:
    tiny: Tiny = request.getfixturevalue(name)
    config = load_model_config(tiny.folder)
    assert {key: getattr(config, key, value) for key, value in SIZES.items()} == SIZES
    assert config.has_indexer == (name == "tiny_v32")
    assert (config.rope_theta, config.rope_scaling) == (10000.0, RopeScaling(8.0, 128, 32.0, 1.0, 1.0, 1.0))
    assert (config.moe_layers, config.dtype) == ((False, True, True), "float32")
    assert config.quantization_config is None


def test_both_spellings_of_rope_are_equal(tmp_path: Path) -> None:
    old = load(tmp_path, changed())
    scaling = read_config(MICRO)["rope_scaling"]
    modern = {**scaling, "rope_type": scaling["type"], "rope_theta": 10000.0}
    new = load(tmp_path, changed(rope_theta=DELETED, rope_scaling=DELETED, rope_parameters=modern))
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    optional = (
        "architectures", "attention_bias", "ep_size", "hidden_act", "moe_layer_freq", "n_shared_experts",
        "norm_topk_prob", "num_key_value_heads", "num_nextn_predict_layers", "quantization_config", "rope_scaling",
        "scoring_func", "tie_word_embeddings", "topk_method", "torch_dtype", "bos_token_id",
    )  # fmt: skip
    config = load(tmp_path, changed(**dict.fromkeys(optional, DELETED)))
    assert (config.rope_scaling, config.quantization_config, config.bos_token_id) == (None, None, None)
    assert (config.n_shared_experts, config.num_nextn_predict_layers, config.norm_topk_prob) == (1, 0, True)


def test_defaults_of_yarn(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 4096}
    config = load(tmp_path, changed(rope_scaling=scaling, max_position_embeddings=16384))
    assert config.rope_scaling == RopeScaling(16384 / 4096, 4096, 32.0, 1.0, 0.0, 0.0)


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    assert load(tmp_path, changed(eos_token_id=[5, 1]), {"eos_token_id": [1, 9]}).eos_token_ids == (5, 1, 9)
    assert load(tmp_path, changed(eos_token_id=None), {"eos_token_id": 3}).eos_token_ids == (3,)
    assert load(tmp_path, changed(eos_token_id=DELETED), {}).eos_token_ids == ()


def test_layers_listed_one_by_one(tmp_path: Path) -> None:
    config = load(tmp_path, changed(mlp_layer_types=["sparse", "dense", "sparse"]))
    assert [config.is_moe_layer(layer) for layer in range(3)] == [True, False, True]
    assert load(tmp_path, changed(moe_layer_freq=2)).moe_layers == (False, False, True)


BAD: list[tuple[Any, str]] = [
    ("{", "config.json is not valid JSON"),
    ("[]", "config.json must hold a JSON object"),
    (changed(model_type="llama"), 'model_type "llama" is not served; those served are deepseek_v32, deepseek_v3'),
    (changed(model_type=DELETED), "missing key model_type"),
    (changed(architectures=["DeepseekV3ForCausalLM"]), "architectures must be"),
    (changed(hidden_size=DELETED), "missing key hidden_size; use the config.json that was published"),
    (changed(hidden_size=DELETED, index_topk=None), "missing keys hidden_size, index_topk"),
    (changed(rope_theta=DELETED), "missing key rope_theta"),
    (changed(vocab_size="many"), r'vocab_size must be a whole number of at least 1 \(it is "many"\)'),
    (changed(vocab_size=True), "vocab_size must be a whole number"),
    (changed(vocab_size=0), "vocab_size must be a whole number of at least 1"),
    (changed(kv_lora_rank=512.5), "kv_lora_rank must be a whole number"),
    (changed(rms_norm_eps="small"), "rms_norm_eps must be a number"),
    (changed(norm_topk_prob="yes"), "norm_topk_prob must be true or false"),
    (changed(scoring_func="softmax"), 'scoring_func is not supported: only "sigmoid" is'),
    (changed(topk_method="greedy"), 'topk_method is not supported: only "noaux_tc" is'),
    (changed(hidden_act="gelu"), 'hidden_act is not supported: only "silu" is'),
    (changed(attention_bias=True), "attention_bias is not supported: only false is"),
    (changed(indexer_rope_interleave=True), "indexer_rope_interleave is not supported: only false is"),
    (changed(num_key_value_heads=2), "num_key_value_heads must equal num_attention_heads"),
    (changed(n_group=3), "n_group must divide n_routed_experts"),
    (changed(n_group=8), "n_group leaves groups of one expert"),
    (changed(topk_group=5), "topk_group must be at most n_group, 4"),
    (changed(num_experts_per_tok=5), "num_experts_per_tok exceeds the 4 experts of the kept groups"),
    (changed(qk_rope_head_dim=63), "qk_rope_head_dim must be even"),
    (changed(index_head_dim=32), "index_head_dim must be at least qk_rope_head_dim"),
    (changed(q_lora_rank=None), "missing key q_lora_rank"),
    (changed(rope_scaling={"type": "linear", "factor": 2}), 'rope_scaling.type is not supported: only "yarn"'),
    (changed(rope_scaling=[1]), "rope_scaling must be an object"),
    (changed(rope_parameters={"rope_type": "yarn", "attention_factor": 2}), "rope_parameters.attention_factor is not"),
    (changed(quantization_config={"quant_method": "awq"}), "quantization_config.quant_method is not supported"),
    (changed(quantization_config={"quant_method": "fp8"}), "quantization_config.weight_block_size must be"),
    (changed(mlp_layer_types=["dense"]), 'mlp_layer_types must list "dense" or "sparse" for each of the 3 layers'),
    (changed(eos_token_id=-1), "eos_token_id must be a token id or a list of token ids"),
]


@pytest.mark.parametrize(("config", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
def test_refusals_are_one_sentence(tmp_path: Path, config: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(tmp_path, config)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, changed(hidden_size=DELETED, vocab_size=-1, hidden_act="relu"))
    for key in ("hidden_size", "vocab_size", "hidden_act"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda _: None, "config.json does not exist: a model folder holds config.json"),
        (lambda folder: (folder / "config.json").mkdir(), "config.json cannot be read"),
    ],
)
def test_no_config(tmp_path: Path, prepare: Callable[[Path], None], sentence: str) -> None:
    prepare(tmp_path)
    with pytest.raises(CheckpointError, match=sentence):
        load_model_config(tmp_path)


def test_v3_needs_no_query_latent(tmp_path: Path) -> None:
    config = load(tmp_path, changed(model_type="deepseek_v3", architectures=DELETED, q_lora_rank=None))
    assert (config.q_lora_rank, config.has_indexer) == (None, False)
