"""Feed-forward layers of the fused model: dense, and the mixture of experts in its two shapes.

Few tokens: tiles of picks, whose number is on the device alone, so that a graph can hold the step. Of up to 16 tokens
the shared expert is one more expert with a tile of its own; of more it runs beside the choice of experts. What experts
return is put together by the norm that follows. Many tokens: experts follow each other in segments, which wastes no
room.

Legend: T tokens, E experts, k picks of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from baleen_kernels import moe_choose
from baleen_kernels.moe_permute import segment_rows

from baleen_worker.model.fused.weights import MlpWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baleen_worker.model.fused.attention import Fp8
    from baleen_worker.model.fused.beside import Beside
    from baleen_worker.model.fused.ops import FusedOps
    from baleen_worker.model.fused.step import FusedStep
    from baleen_worker.model.fused.weights import MoeWeights
    from baleen_worker.model_config import ModelConfig

# Tokens up to which experts have few each, and their weights are what takes time. Also the most that a graph decodes.
MOST_TILED = 256


@dataclass(frozen=True, slots=True)
class Returned:
    """What experts returned for T tokens, not yet put together, as `combine_norm` takes it.

    rows [T * k, hidden], in the order of the picks; weights [T, k]; shared [T, hidden], None if it is among the rows.
    """

    rows: Tensor
    weights: Tensor
    shared: Tensor | None


class FusedMlp:
    """down(silu(gate x) * up x) on FP8."""

    def __init__(self, weights: MlpWeights, ops: FusedOps, *, dtype: torch.dtype, scale_ue8m0: bool) -> None:
        self._weights, self._ops, self._dtype, self._ue8m0 = weights, ops, dtype, scale_ue8m0

    def __call__(self, y: Tensor, rounded: Fp8, step: FusedStep | None = None) -> Tensor:
        """rounded: y [T, hidden] in FP8 -> [T, hidden]."""
        del y, step
        w, ops = self._weights, self._ops
        gate_up = ops.product(rounded, w.gate_up, self._dtype)
        values, scales = ops.swiglu_quant(gate_up[None], None, scale_ue8m0=self._ue8m0)
        return ops.product((values[0], scales[0]), w.down, self._dtype)


class UniformRouting:
    """Router scores that have nothing to do with the tokens, so that experts are picked evenly.

    Random weights send most tokens to the same experts, which makes a step much cheaper than traffic does. Scores
    depend on a token's slot, its layer and nothing else: a row of a random table for all layers, found once a step.
    """

    # A prime, so that strides of whole pages meet all rows. Many, since two tokens on one row pick the same experts: of
    # 16 tokens two do so in 0.7 % of steps, and five experts fewer are read.
    _ROWS = 16_381

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)
        self._num_experts = num_experts
        self._table = torch.randn(self._ROWS, num_layers * num_experts, generator=g, device=device)

    def logits(self, layer: int, step: FusedStep) -> Tensor:
        """[T, E] float32."""
        if step.routing is None:
            step.routing = self._table.index_select(0, step.kv_slots % self._ROWS)
        return step.routing[:, layer * self._num_experts : (layer + 1) * self._num_experts]


class FusedMoe:
    """Routed experts and the shared one."""

    def __init__(
        self,
        layer: int,
        weights: MoeWeights,
        config: ModelConfig,
        ops: FusedOps,
        *,
        dtype: torch.dtype,
        scale_ue8m0: bool,
        uniform: UniformRouting | None,
        beside: Beside,
    ) -> None:
        self._beside = beside
        self._layer, self._weights, self._ops = layer, weights, ops
        self._dtype, self._ue8m0, self._uniform = dtype, scale_ue8m0, uniform
        # A random bias would make some experts favourites.
        self._bias = weights.bias if uniform is None else torch.zeros_like(weights.bias)
        # On PyTorch ops the choice of few tokens gains nothing, and a graph cannot hold it.
        fused_choice = ops.backends["moe_choose"] != "torch" or ops.backends["moe_route"] == "torch"
        self._experts_of_few = weights.listed if fused_choice else None
        self._choice: dict[str, Any] = {
            "num_groups": config.n_group,
            "topk_groups": config.topk_group,
            "topk": config.num_experts_per_tok,
            "normalize": config.norm_topk_prob,
            "scaling_factor": config.routed_scaling_factor,
        }
        self._shared = FusedMlp(weights.shared, ops, dtype=dtype, scale_ue8m0=scale_ue8m0)

    def __call__(self, y: Tensor, rounded: Fp8, step: FusedStep) -> Tensor | Returned:
        """y [T, hidden], normed, and the same in FP8 -> [T, hidden], of few tokens not yet put together."""
        num_tokens = y.shape[0]
        if self._experts_of_few is not None and num_tokens <= moe_choose.MOST_TOKENS:
            return self._listed(y, rounded, step, self._experts_of_few)
        # First the router, which would otherwise queue behind the shared expert's blocks of threads.
        logits = self._logits(y, step)
        shared = self._beside.start(lambda: self._shared(y, rounded), num_tokens=num_tokens)
        ids, weights = self._ops.moe_route(logits, self._bias, **self._choice)
        if num_tokens <= MOST_TILED:
            tiles = self._ops.moe_tiles(ids, num_experts=self._weights.router.shape[0])
            rows = self._tiled(rounded, MlpWeights(self._weights.gate_up, self._weights.down), tiles, ids.shape[1])
            return Returned(rows, weights, shared.join())
        rows, places = self._segmented(rounded, ids)
        return self._ops.moe_combine(rows, places, weights, shared.join())

    def _listed(self, y: Tensor, rounded: Fp8, step: FusedStep, experts: MlpWeights) -> Returned:
        given = None if self._uniform is None else self._uniform.logits(self._layer, step)
        weights, *tiles = self._ops.moe_choose(y, self._weights.router, self._bias, given, **self._choice)
        return Returned(self._tiled(rounded, experts, tiles, weights.shape[1]), weights, None)

    def _logits(self, y: Tensor, step: FusedStep) -> Tensor:
        # Computed even where it is not used: a step without it would be too short.
        logits = self._ops.wide_gemm(y, self._weights.router)
        return logits if self._uniform is None else self._uniform.logits(self._layer, step)

    def _tiled(self, rounded: Fp8, experts: MlpWeights, tiles: Sequence[Tensor], picks: int) -> Tensor:
        """-> [T * picks, hidden], in the order of the picks."""
        gate_up, down, ops = experts.gate_up, experts.down, self._ops
        options = {"picks": picks, "scale_ue8m0": self._ue8m0, "dtype": self._dtype}
        hidden = ops.tile_hidden(*rounded, gate_up.values, gate_up.scales, *tiles, **options)
        return ops.tile_out(*hidden, down.values, down.scales, *tiles, dtype=self._dtype)

    def _segmented(self, rounded: Fp8, ids: Tensor) -> tuple[Tensor, Tensor]:
        """-> rows [R, hidden] and places [T, k] among them."""
        w, ops = self._weights, self._ops
        num_experts = w.router.shape[0]
        places, expert_of_row = ops.moe_segments(ids, num_experts=num_experts)
        room = segment_rows(ids.numel(), num_experts)
        values, scales = ops.moe_scatter(*rounded, places, num_boxes=1, room=room)
        gate_up = ops.contiguous_gemm(
            values[0], scales[0], w.gate_up.values, w.gate_up.scales, expert_of_row, dtype=self._dtype
        )
        values, scales = ops.swiglu_quant(gate_up[None], None, scale_ue8m0=self._ue8m0, expert_of_row=expert_of_row)
        rows = ops.contiguous_gemm(values[0], scales[0], w.down.values, w.down.scales, expert_of_row, dtype=self._dtype)
        return rows, places
