"""Feed-forward layers of the fused model: dense, and the mixture of experts in its two shapes.

Few tokens: tiles of picks, whose number is on the device alone, so that a graph can hold the step; the shared expert
runs beside the choice of experts. Many tokens: experts follow each other in segments, which wastes no room.

Legend: T tokens, E experts, k picks of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.moe_permute import segment_rows

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.model.fused.attention import Fp8
    from baleen_worker.model.fused.beside import Beside
    from baleen_worker.model.fused.ops import FusedOps
    from baleen_worker.model.fused.step import FusedStep
    from baleen_worker.model.fused.weights import MlpWeights, MoeWeights
    from baleen_worker.model_config import ModelConfig

# Tokens up to which experts have few each, and their weights are what takes time. Also the most that a graph decodes.
MOST_TILED = 256


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
    depend on a token's slot, its layer and nothing else: a row of a random table for all layers, found by a hash once a
    step.
    """

    _ROWS = 1021  # a prime, so that strides of whole pages meet all rows

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)
        self._num_experts = num_experts
        self._table = torch.randn(self._ROWS, num_layers * num_experts, generator=g, device=device)

    def logits(self, layer: int, step: FusedStep) -> Tensor:
        """[T, E] float32."""
        if step.routing is None:
            step.routing = self._table[step.kv_slots * 2654435761 % self._ROWS]
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
        self._layer, self._weights, self._config, self._ops = layer, weights, config, ops
        self._dtype, self._ue8m0, self._uniform = dtype, scale_ue8m0, uniform
        # A random bias would make some experts favourites.
        self._bias = weights.bias if uniform is None else torch.zeros_like(weights.bias)
        self._shared = FusedMlp(weights.shared, ops, dtype=dtype, scale_ue8m0=scale_ue8m0)

    def __call__(self, y: Tensor, rounded: Fp8, step: FusedStep) -> Tensor:
        """y [T, hidden], normed, and the same in FP8 -> [T, hidden]."""
        few = y.shape[0] <= MOST_TILED
        # First the router, which would otherwise queue behind the shared expert's blocks of threads.
        logits = self._logits(y, step)
        shared = self._beside.start(lambda: self._shared(y, rounded), num_tokens=y.shape[0])
        ids, weights = self._route(logits)
        rows, places = self._tiled(rounded, ids) if few else self._segmented(rounded, ids)
        return self._ops.moe_combine(rows, places, weights, shared.join())

    def _logits(self, y: Tensor, step: FusedStep) -> Tensor:
        # Computed even where it is not used: a step without it would be too short.
        logits = self._ops.wide_gemm(y, self._weights.router)
        return logits if self._uniform is None else self._uniform.logits(self._layer, step)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        return self._ops.moe_route(
            logits,
            self._bias,
            num_groups=config.n_group,
            topk_groups=config.topk_group,
            topk=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )

    def _tiled(self, rounded: Fp8, ids: Tensor) -> tuple[Tensor, None]:
        """-> rows [T * k, hidden], in the order of the picks."""
        w, ops = self._weights, self._ops
        tiles = ops.moe_tiles(ids, num_experts=w.router.shape[0])
        hidden = ops.tile_hidden(
            *rounded,
            w.gate_up.values,
            w.gate_up.scales,
            *tiles,
            picks=ids.shape[1],
            scale_ue8m0=self._ue8m0,
            dtype=self._dtype,
        )
        return ops.tile_out(*hidden, w.down.values, w.down.scales, *tiles, dtype=self._dtype), None

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
        values, scales = ops.swiglu_quant(gate_up[None], None, scale_ue8m0=self._ue8m0)
        rows = ops.contiguous_gemm(values[0], scales[0], w.down.values, w.down.scales, expert_of_row, dtype=self._dtype)
        return rows, places
