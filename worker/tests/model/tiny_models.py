"""Random tiny models for the tests: configs in the released form, and weights under the released names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "ep_size": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}
V3: dict[str, Any] = {
    **{key: value for key, value in V32.items() if not key.startswith("index_")},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}

# Shapes that differ from V32 in as many ways as the architecture allows.
OTHER_SHAPES: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 28,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500000.0,
    "rope_scaling": None,
}


def make_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random float32 weights of every tensor the model needs, exactly representable in bfloat16 where matrices."""
    g = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = torch.randn(rows, columns, generator=g) * gain / columns**0.5
        weights[name + ".weight"] = values.to(torch.bfloat16).float()

    def norm(name: str, width: int) -> None:
        weights[name + ".weight"] = 1.0 + 0.2 * torch.randn(width, generator=g)

    def mlp(prefix: str, width: int) -> None:
        matrix(prefix + "gate_proj", width, hidden)
        matrix(prefix + "up_proj", width, hidden)
        matrix(prefix + "down_proj", hidden, width)

    hidden = config["hidden_size"]
    weights["model.embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=g).bfloat16().float()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm", hidden)
        norm(prefix + "post_attention_layernorm", hidden)
        _attention_weights(config, prefix + "self_attn.", matrix, norm)
        if "index_topk" in config:
            weights[prefix + "self_attn.indexer.k_norm.bias"] = 0.2 * torch.randn(config["index_head_dim"], generator=g)
        if layer < config["first_k_dense_replace"]:
            mlp(prefix + "mlp.", config["intermediate_size"])
            continue
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        matrix(prefix + "mlp.gate", experts, hidden)
        # Negative on purpose: dropping groups with 0 instead of -inf then picks other experts.
        weights[prefix + "mlp.gate.e_score_correction_bias"] = -0.6 + 0.15 * torch.randn(experts, generator=g)
        for expert in range(experts):
            mlp(f"{prefix}mlp.experts.{expert}.", width)
        mlp(prefix + "mlp.shared_experts.", width * config["n_shared_experts"])
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, gain=2.0)
    return weights


def _attention_weights(config: dict[str, Any], prefix: str, matrix: Any, norm: Any) -> None:
    hidden, heads, q_lora = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    q_width = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if q_lora is None:
        matrix(prefix + "q_proj", q_width, hidden)
    else:
        matrix(prefix + "q_a_proj", q_lora, hidden)
        norm(prefix + "q_a_layernorm", q_lora)
        matrix(prefix + "q_b_proj", q_width, q_lora)
    latent = config["kv_lora_rank"]
    matrix(prefix + "kv_a_proj_with_mqa", latent + config["qk_rope_head_dim"], hidden)
    norm(prefix + "kv_a_layernorm", latent)
    matrix(prefix + "kv_b_proj", heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent)
    matrix(prefix + "o_proj", hidden, heads * config["v_head_dim"])
    if "index_topk" in config:
        matrix(prefix + "indexer.wq_b", config["index_n_heads"] * config["index_head_dim"], q_lora)
        matrix(prefix + "indexer.wk", config["index_head_dim"], hidden)
        norm(prefix + "indexer.k_norm", config["index_head_dim"])
        matrix(prefix + "indexer.weights_proj", config["index_n_heads"], hidden)


def random_ids(config: dict[str, Any], length: int, seed: int) -> Tensor:
    """[length] int64."""
    return torch.randint(0, config["vocab_size"], (length,), generator=torch.Generator().manual_seed(1000 + seed))
