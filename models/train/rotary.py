"""Rotary positions with YaRN, in the two layouts of V3.2: interleaved pairs in attention, halves in the indexer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.train.config import Config


def frequencies(config: Config) -> Tensor:
    """Angle per position of each of the qk_rope_head_dim / 2 pairs, float32."""
    width, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    wavelength = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def pair_that_turns(times: float) -> float:
        ratio = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(scaling["beta_slow"])), width - 1)
    fast = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * wavelength) * (1 - fast) + 1.0 / wavelength * fast


def table(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, pairs] of positions 0 .. length - 1, float32."""
    angle = torch.arange(length, device=device)[:, None].float() * frequencies(config).to(device)
    return angle.cos(), angle.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, R], channels (2i, 2i + 1) turned together; in float32, back in x's dtype."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, R], channels (i, i + R/2) turned together; in float32, back in x's dtype."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
