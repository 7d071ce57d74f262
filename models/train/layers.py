"""Linears that see their weights as block FP8 will round them, norms, feed-forward and experts.

Parameters are float32 masters; a product is taken in the dtype of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.train.config import TILE, Config

E4M3_MAX = 448.0


def block_scales(matrix: Tensor) -> Tensor:
    """The power-of-two scale of each 128 x 128 tile: the smallest with which the tile fits e4m3."""
    out, into = matrix.shape
    rows, columns = -(-out // TILE), -(-into // TILE)
    padded = nn.functional.pad(matrix, (0, columns * TILE - into, 0, rows * TILE - out))
    amax = padded.view(rows, TILE, columns, TILE).abs().amax((1, 3)).clamp(min=1e-12)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def spread(scales: Tensor, out: int, into: int) -> Tensor:
    """Scales of tiles -> the scale of each element [out, into]."""
    return scales.repeat_interleave(TILE, 0)[:out].repeat_interleave(TILE, 1)[:, :into]


def rounded(matrix: Tensor) -> Tensor:
    """The matrix as it will be after block FP8, with the gradient of the matrix itself."""
    plain = matrix.detach()
    scale = spread(block_scales(plain), *plain.shape)
    fp8 = (plain / scale).to(torch.float8_e4m3fn).to(plain.dtype) * scale
    return matrix + (fp8 - plain)


class Linear(nn.Module):
    """x [..., in] -> x W^T. `quantised`: the checkpoint stores the matrix in block FP8, so training may round it."""

    round_weights = False  # of all instances: set for the last stages

    def __init__(self, into: int, out: int, *, quantised: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        self.quantised = quantised
        self.weight = nn.Parameter(torch.randn(out, into) * (gain * into**-0.5))

    def matrix(self) -> Tensor:
        """The weight, rounded where training rounds."""
        return rounded(self.weight) if self.quantised and Linear.round_weights else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix().to(x.dtype))


class RmsNorm(nn.Module):
    """weight * x / rms(x) in float32, back in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (self.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm with bias, in float32, back in x's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, 1e-6).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def best_groups(groups: Tensor, config: Config) -> Tensor:
    """Biased scores [T, groups, E / groups] -> the groups whose two best experts have the largest sum."""
    return groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices


class Gate(nn.Module):
    """Group-limited sigmoid routing in float32: weights [T, E], 0 for experts not picked, and the load of each."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        bias = torch.zeros(config.n_routed_experts)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        scores = nn.functional.linear(x.float(), self.weight).sigmoid()  # [T, E]
        biased = scores.detach() + self.e_score_correction_bias
        groups = biased.unflatten(-1, (c.n_group, -1))
        best = best_groups(groups, c)  # [T, kept groups]
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter(-1, best, True)
        open_scores = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        picked = torch.zeros_like(scores).scatter(-1, open_scores.topk(c.num_experts_per_tok, -1).indices, 1.0)
        weights = scores * picked
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return weights, picked.sum(0)


class MoE(nn.Module):
    """Every expert is computed for every token and weighed, 0 where it is not picked: cheap at this size.

    `load` holds the number of tokens of each expert since `balance` was last called.
    """

    def __init__(self, config: Config, *, gain: float) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Mlp(config.hidden_size, width, gain=gain) for _ in range(config.n_routed_experts))
        self.shared_experts = Mlp(config.hidden_size, width * config.n_shared_experts, gain=gain)
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)
        self.load: Tensor

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, -2)
        weights, load = self.gate(x)
        if self.training:
            self.load.add_(load.detach())
        gate = torch.cat([expert.gate_proj.matrix() for expert in self.experts]).to(x.dtype)
        up = torch.cat([expert.up_proj.matrix() for expert in self.experts]).to(x.dtype)
        down = torch.cat([expert.down_proj.matrix() for expert in self.experts], 1).to(x.dtype)
        inner = nn.functional.silu(nn.functional.linear(x, gate)) * nn.functional.linear(x, up)  # [T, E * width]
        inner = inner.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None].to(x.dtype)
        return (nn.functional.linear(inner.flatten(-2), down) + self.shared_experts(x)).view(shape)

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Auxiliary-loss-free balancing: experts with less than their share become a little easier to pick."""
        self.gate.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
