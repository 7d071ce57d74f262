"""What a machine should use where the operator did not say: pure tables by architecture, without a look at the machine.

The attention defaults are those that users of SGLang know. What is not installed or not written is `selection`'s
business, which takes the next of `PREFERENCES` and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BFLOAT16, FP8 = "bfloat16", "fp8_e4m3"


@dataclass(frozen=True, slots=True)
class AttentionDefaults:
    """Format of the latent pool, and names of the backends of sparse attention."""

    kv_cache_dtype: str
    prefill: str
    decode: str


def attention_defaults(arch: str, *, kv_cache_dtype: str = "auto") -> AttentionDefaults:
    """For "sm90", "sm100", "gfx942", "xpu", "npu", "cpu", …; `kv_cache_dtype` "auto" takes the architecture's.

    ValueError for a format that latent pools do not have.
    """
    if kv_cache_dtype == "auto":
        kv_cache_dtype = FP8 if _is_blackwell(arch) else BFLOAT16
    if kv_cache_dtype not in (BFLOAT16, FP8):
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r}: sparse attention reads {BFLOAT16} or {FP8} pools")
    return AttentionDefaults(kv_cache_dtype, *_attention_backends(arch, packed=kv_cache_dtype == FP8))


def _attention_backends(arch: str, *, packed: bool) -> tuple[str, str]:
    if arch == "sm90":
        return ("flashmla_kv", "flashmla_kv") if packed else ("flashmla_sparse", "fa3")
    if _is_blackwell(arch):
        return ("trtllm", "trtllm") if packed else ("flashmla_sparse", "trtllm")
    if arch.startswith("gfx"):
        return "triton", "triton"
    if arch == "npu":
        return "npu", "npu"
    return "torch", "torch"


def _is_blackwell(arch: str) -> bool:
    return arch in ("sm100", "sm103")


# What to use for each op, best first; an op that is not listed has only "torch".
PREFERENCES: Mapping[str, Sequence[str]] = {
    "absorb_queries": ("triton", "torch"),
    "compact_slots": ("triton", "torch"),
    "contiguous_gemm": ("deep_gemm", "torch"),
    "combine_norm": ("triton", "torch"),
    "decode_inputs": ("triton", "torch"),
    "decode_results": ("triton", "torch"),
    "fp8_gemm": ("deep_gemm", "torch"),
    "fp8_quant": ("triton", "torch"),
    "greedy_choice": ("triton", "torch"),
    "indexer_prep": ("cuda", "triton", "torch"),
    "mask_logits": ("triton", "torch"),
    "masked_gemm": ("deep_gemm", "torch"),
    "merge_parts": ("triton", "torch"),
    "mha_dense": ("fa3", "torch"),
    "mha_partial": ("fa3", "torch"),
    "mla_pages": ("flashmla", "triton", "torch"),
    "mla_prep": ("triton", "torch"),
    "moe_boxes": ("triton", "torch"),
    "moe_choose": ("cuda", "torch"),
    "moe_combine": ("triton", "torch"),
    "moe_route": ("triton", "torch"),
    "moe_scatter": ("triton", "torch"),
    "moe_segments": ("triton", "torch"),
    "moe_tiles": ("triton", "torch"),
    "norm_quant": ("triton", "torch"),
    "page_copy": ("triton", "torch"),
    "page_digest": ("triton", "torch"),
    "paged_scores": ("deep_gemm", "torch"),
    "ragged_scores": ("deep_gemm", "torch"),
    "rotate_queries": ("triton", "torch"),
    "sample": ("triton", "torch"),
    "swiglu_quant": ("triton", "torch"),
    "thin_gemm": ("triton", "torch"),
    "tile_hidden": ("triton", "torch"),
    "tile_out": ("triton", "torch"),
    "topk_slots": ("cuda", "torch"),
    "value_quant": ("triton", "torch"),
    "wide_gemm": ("cublas", "torch"),
}


# Instead of a default, what does the same in less time: FA3 over slots takes 1.0 to 1.5 times as long on an H200.
_FASTER = {"fa3": "flashmla_sparse"}


def attention_preferences(default: str, *, packed: bool, prefill: bool) -> Sequence[str]:
    """The default, or what was measured to be faster, and what can stand in for it on the same pool.

    Our own two for bfloat16 pools: `tilelang` is ahead on prompts, `triton` on the few rows of a decode step.
    """
    library = "flashmla_kv" if packed else "flashmla_sparse"
    own = ("tilelang", "triton") if prefill and not packed else ("triton",)
    return tuple(dict.fromkeys((_FASTER.get(default, default), default, library, *own, "torch")))
