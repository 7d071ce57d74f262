"""Tiny random checkpoints written by transformers' `save_pretrained`, and what its model says: the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import ModelConfig, load_model_config
from baleen_worker.runner import empty_model
from baleen_worker.weights import LoadReport, load_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "qk_nope_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# With this many heads no index score is an exact zero, so that no tie is left to the oracle's taste.
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint folder and the transformers model that wrote it."""

    folder: Path
    oracle: Any

    @property
    def vocab_size(self) -> int:
        return SIZES["vocab_size"]

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor."""
        return {k: v for path in self.folder.glob("*.safetensors") for k, v in load_file(path).items()}

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[S, V] float32."""
        return self.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The straightforward loop: the whole sequence anew for each token."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]


def save_tiny(folder: Path, model_type: str, *, max_shard_size: str = "1GB", seed: int = 0, **options: Any) -> Tiny:
    """Random weights with some spread in every tensor, gains and router biases included."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

    sizes = {**SIZES, "rope_parameters": dict(YARN), **options}
    if model_type == "deepseek_v32":
        model: Any = DeepseekV32ForCausalLM(DeepseekV32Config(**{**INDEXER, **sizes}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=g)
            if tensor.ndim > 1:
                tensor.copy_(noise * 1.5 * tensor.shape[-1] ** -0.5)
            else:
                tensor.copy_(0.1 * noise + (1.0 if name.endswith("norm.weight") else 0.0))
    model.eval()
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Tiny(folder, model)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder with one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))


def load(folder: Path, **options: Any) -> tuple[Any, LoadReport, ModelConfig]:
    """The product's model with the folder's weights, on the CPU."""
    dtype = options.pop("dtype", torch.float32)
    keep_fp8 = options.pop("keep_fp8", False)
    config = load_model_config(folder)
    model = empty_model(config, Numerics.for_dtype(dtype), keep_fp8=keep_fp8)
    report = load_weights(model, folder, config, device=torch.device("cpu"), **options)
    return model, report, config
