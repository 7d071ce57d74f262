"""The ops of the fused model, each bound to the backend that was selected for it. Chosen once, at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from baleen_kernels import (
    combine_norm,
    decode_inputs,
    decode_results,
    expert_tiles,
    fp8_gemm,
    fp8_quant,
    greedy_choice,
    grouped_gemm,
    index_scores,
    indexer_prep,
    mask_logits,
    mha_dense,
    mha_partial,
    mla_prep,
    mla_query,
    mla_slots,
    moe_choose,
    moe_permute,
    moe_route,
    norm_quant,
    sample,
    selection,
    swiglu_quant,
    thin_gemm,
    topk_slots,
    value_quant,
    wide_gemm,
)

if TYPE_CHECKING:
    import torch
    from baleen_kernels.selection import Selection
    from torch import Tensor

    from baleen_worker.model.fused.weights import Fp8Matrix

Call = Callable[..., Any]

# Each role of the selection that the fused model plays, and the op behind it.
CALLS: dict[str, Call] = {
    "absorb_queries": mla_query.absorb_queries,
    "combine_norm": combine_norm.combine_norm,
    "contiguous_gemm": grouped_gemm.contiguous_gemm,
    "decode_inputs": decode_inputs.decode_inputs,
    "decode_results": decode_results.decode_results,
    "fp8_gemm": fp8_gemm.fp8_gemm,
    "fp8_quant": fp8_quant.quantize_groups,
    "greedy_choice": greedy_choice.greedy_choice,
    "indexer_prep": indexer_prep.indexer_prep,
    "mask_logits": mask_logits.mask_logits,
    "mha_dense": mha_dense.mha_dense,
    "mha_partial": mha_partial.mha_partial,
    "mla_prep": mla_prep.mla_prep,
    selection.DECODE: mla_slots.mla_slots,
    selection.PREFILL: mla_slots.mla_slots,
    "moe_choose": moe_choose.moe_choose,
    "moe_combine": moe_permute.moe_combine,
    "moe_route": moe_route.moe_route,
    "moe_scatter": moe_permute.moe_scatter,
    "moe_segments": moe_permute.moe_segments,
    "moe_tiles": expert_tiles.moe_tiles,
    "norm_quant": norm_quant.norm_quant,
    "paged_scores": index_scores.paged_scores,
    "ragged_scores": index_scores.ragged_scores,
    "rotate_queries": mla_query.rotate_queries,
    "sample": sample.sample,
    "swiglu_quant": swiglu_quant.swiglu_quant,
    "thin_gemm": thin_gemm.thin_gemm,
    "tile_hidden": expert_tiles.tile_hidden,
    "tile_out": expert_tiles.tile_out,
    "topk_slots": topk_slots.topk_slots,
    "value_quant": value_quant.value_quant,
    "wide_gemm": wide_gemm.wide_gemm,
}
ROLES = frozenset(CALLS)


@dataclass(frozen=True, slots=True)
class FusedOps:
    """One callable a role, its backend bound. `attend_*` are the two roles of `mla_slots`."""

    absorb_queries: Call
    attend_decode: Call
    attend_prefill: Call
    combine_norm: Call
    contiguous_gemm: Call
    decode_inputs: Call
    decode_results: Call
    fp8_gemm: Call
    fp8_quant: Call
    greedy_choice: Call
    indexer_prep: Call
    mask_logits: Call
    mha_dense: Call
    mha_partial: Call
    mla_prep: Call
    moe_choose: Call
    moe_combine: Call
    moe_route: Call
    moe_scatter: Call
    moe_segments: Call
    moe_tiles: Call
    norm_quant: Call
    paged_scores: Call
    ragged_scores: Call
    rotate_queries: Call
    sample: Call
    swiglu_quant: Call
    thin_gemm: Call
    tile_hidden: Call
    tile_out: Call
    topk_slots: Call
    value_quant: Call
    wide_gemm: Call
    backends: dict[str, str]

    @classmethod
    def of(cls, chosen: Selection) -> FusedOps:
        """Binds what was selected."""
        names = {selection.DECODE: "attend_decode", selection.PREFILL: "attend_prefill"}
        backends = {role: chosen.backend(role) for role in CALLS}
        bound = {names.get(role, role): partial(call, backend=backends[role]) for role, call in CALLS.items()}
        return cls(**bound, backends=backends)

    def product(self, x: tuple[Tensor, Tensor], matrix: Fp8Matrix, dtype: torch.dtype) -> Tensor:
        """x, values [T, K] and scales [T, K / 128], times the matrix's [N, K] -> [T, N]."""
        multiply = self.thin_gemm if x[0].shape[0] <= thin_gemm.MOST_TOKENS else self.fp8_gemm
        return multiply(*x, matrix.values, matrix.scales, dtype=dtype)

    def schedule_of(self, lengths: Tensor) -> Tensor | None:
        """How paged scoring spreads over the device: made once a step for all layers, where the backend wants it."""
        return index_scores.paged_schedule(lengths) if self.backends["paged_scores"] == "deep_gemm" else None

    def attention_plan(self, role: str) -> Any:
        """An empty plan for all layers of one step, where the backend of that role of `mla_slots` wants one."""
        return mla_slots.flashmla_plan() if self.backends[role] == "flashmla_kv" else None
