"""Arguments of the shapes that a model's fused ops are called with, without contents: so that a backend which cannot
take a model's heads or widths is found when it is chosen, not at the first request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from baleen_kernels import fp8_quant, index_key_pack, latent_pack, selection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from baleen_worker.model_config import ModelConfig

_TOKENS = 4
_FP8 = torch.float8_e4m3fn


def samples(config: ModelConfig, *, packed: bool, dtype: torch.dtype) -> Mapping[str, Mapping[str, Any]]:
    """By role. `packed`: latents are packed FP8, else of `dtype`."""
    heads, latent, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, hidden = config.qk_nope_head_dim, config.hidden_size
    queries = _meta(_TOKENS, heads, nope + rope, dtype=dtype)
    latents = (
        _meta(128, latent_pack.fp8_latent_bytes(latent, rope), dtype=torch.uint8)
        if packed
        else _meta(128, latent + rope, dtype=dtype)
    )
    attend = {
        "q": _meta(_TOKENS, heads, latent + rope, dtype=dtype),
        "latents": latents,
        "slots": _meta(_TOKENS, config.index_topk, dtype=torch.int32),
        "softmax_scale": 1.0,
    }
    keys = {"q": queries, "k": queries, "v": _meta(_TOKENS, heads, config.v_head_dim, dtype=dtype)}
    rows = {**keys, "cu_q": [0, _TOKENS], "cu_k": [0, _TOKENS], "softmax_scale": 1.0}
    angles = {"cos_sin": _meta(8, rope), "positions": _meta(_TOKENS, dtype=torch.int64)}
    picks = {"expert_ids": _meta(_TOKENS, 1, dtype=torch.int64), "num_experts": config.n_routed_experts}
    expert_rows = {**_product(config.moe_intermediate_size * 2, hidden), "dtype": dtype}
    return {
        selection.PREFILL: attend,
        selection.DECODE: attend,
        "absorb_queries": {"q": queries, "up_k": _meta(heads, nope, latent, dtype=dtype), **angles},
        "rotate_queries": {"q": queries, **angles},
        "fp8_gemm": {
            **_product(config.index_head_dim + (config.q_lora_rank or 0) + latent + rope, hidden),
            "dtype": dtype,
        },
        "contiguous_gemm": expert_rows,
        "moe_segments": picks,
        "moe_tiles": picks,
        "fp8_quant": {"x": _meta(_TOKENS, hidden, dtype=dtype), "scale_ue8m0": True},
        "indexer_prep": {
            "q": _meta(_TOKENS, config.index_n_heads, config.index_head_dim, dtype=dtype),
            "k": _meta(_TOKENS, config.index_head_dim, dtype=dtype),
            "pages": _meta(2, index_key_pack.index_page_bytes(config.index_head_dim), dtype=torch.uint8),
        },
        "mha_dense": rows,
        "mha_partial": {**rows, "causal": True},
        "mla_prep": {
            "x": _meta(_TOKENS, (config.q_lora_rank or 0) + latent + rope, dtype=dtype),
            "q_weight": _meta(config.q_lora_rank or 0),
            "kv_weight": _meta(latent),
            "cos_sin": angles["cos_sin"],
        },
        "moe_choose": {
            "y": _meta(_TOKENS, hidden, dtype=dtype),
            "router": _meta(config.n_routed_experts, hidden, dtype=dtype),
            "num_groups": config.n_group,
            "topk": config.num_experts_per_tok,
        },
        "moe_route": {
            "logits": _meta(_TOKENS, config.n_routed_experts),
            "bias": _meta(config.n_routed_experts),
            "num_groups": config.n_group,
        },
        "thin_gemm": _product(config.index_head_dim + (config.q_lora_rank or 0) + latent + rope, hidden),
        "topk_slots": {"scores": _meta(_TOKENS, config.max_position_embeddings), "topk": config.index_topk},
        "wide_gemm": {"x": _meta(_TOKENS, hidden, dtype=dtype), "weight": _meta(64, hidden, dtype=dtype)},
    }


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _product(out_features: int, width: int) -> dict[str, Tensor]:
    tile = fp8_quant.TILE
    return {
        "values": _meta(_TOKENS, width, dtype=_FP8),
        "scales": _meta(_TOKENS, width // tile),
        "weight": _meta(out_features, width, dtype=_FP8),
        "weight_scale": _meta(-(-out_features // tile), width // tile),
    }
