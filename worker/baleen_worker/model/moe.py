"""Feed-forward layers: SwiGLU, and the mixture of experts with group-limited sigmoid routing.

Legend: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.moe_experts import moe_experts
from baleen_kernels.moe_route import moe_route
from baleen_kernels.swiglu import swiglu
from torch import Tensor, nn

from baleen_worker.model.linear import BlockLinear, weight

if TYPE_CHECKING:
    from baleen_worker.model.numerics import Numerics
    from baleen_worker.model_config import ModelConfig


class Mlp(nn.Module):
    """x [T, hidden] -> down(silu(gate x) * up x) [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, numerics: Numerics, keep_fp8: bool) -> None:
        super().__init__()
        self.gate_proj = BlockLinear(hidden_size, intermediate_size, numerics=numerics, keep_fp8=keep_fp8)
        self.up_proj = BlockLinear(hidden_size, intermediate_size, numerics=numerics, keep_fp8=keep_fp8)
        self.down_proj = BlockLinear(intermediate_size, hidden_size, numerics=numerics, keep_fp8=keep_fp8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Gate(nn.Module):
    """The router: x [T, hidden] -> expert ids [T, k] and weights [T, k], all in float32.

    `e_score_correction_bias` steers the choice only; the weights are without it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_groups, self.topk_groups = config.n_group, config.topk_group
        self.topk = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.scaling_factor = config.routed_scaling_factor
        self.weight = weight(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = weight(config.n_routed_experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moe_route(
            nn.functional.linear(x.float(), self.weight),
            self.e_score_correction_bias,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            topk=self.topk,
            normalize=self.normalize,
            scaling_factor=self.scaling_factor,
        )


class MoE(nn.Module):
    """x [T, hidden] -> weighted sum of the picked experts, plus the shared expert, neither gated nor scaled."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, keep_fp8: bool) -> None:
        super().__init__()

        def mlp(num_experts: int) -> Mlp:
            width = num_experts * config.moe_intermediate_size
            return Mlp(config.hidden_size, width, numerics=numerics, keep_fp8=keep_fp8)

        self.gate = Gate(config)
        self.experts = nn.ModuleList(mlp(1) for _ in range(config.n_routed_experts))
        self.shared_experts = mlp(config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, expert_weights = self.gate(x)
        routed = moe_experts(x, expert_ids, expert_weights, lambda e, rows: self.experts[e](rows))
        return (routed + self.shared_experts(x).float()).to(x.dtype)  # summed in float32
