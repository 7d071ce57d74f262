"""Rotary positions with YaRN: frequencies, the table of one step, and the softmax scale that YaRN changes.

Sources: YaRN paper (arXiv 2309.00071) as configured by the model card; `mscale` as in DeepSeek-V3's released code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin [T, d/2] float32 of each token's angle with each rotary pair."""

    cos: Tensor
    sin: Tensor

    def at(self, tokens: Tensor) -> RotaryTable:
        """The table of some of the tokens."""
        return RotaryTable(self.cos[tokens], self.sin[tokens])


def rotary_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each of the width/2 pairs, float32 on the CPU.

    Without scaling f_i = theta^(-2i/width). YaRN keeps f for pairs that turn often within the original context, uses
    f / factor for those that turn seldom, and blends linearly between the two.
    """
    wavelength = theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if scaling is None:
        return 1.0 / wavelength

    def pair_that_turns(times: float) -> float:
        ratio = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), width - 1)
    span = high - low or 0.001  # a step where the blend has no width
    fast = 1 - ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    # In this order of operations: at position 1e5 the last bit of a frequency turns the angle by a hundredth.
    return 1.0 / (scaling.factor * wavelength) * (1 - fast) + 1.0 / wavelength * fast


def rotary_table(positions: Tensor, frequencies: Tensor, magnitude: float) -> RotaryTable:
    """positions [T] -> the step's table; `magnitude` scales cos and sin (see `rotary_magnitude`)."""
    angle = positions[:, None].float() * frequencies.to(positions.device)
    return RotaryTable(angle.cos() * magnitude, angle.sin() * magnitude)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_magnitude(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: 1 in released models, where mscale equals mscale_all_dim."""
    if scaling is None:
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """Scale of the attention scores: head width^(-1/2), times the *square* of mscale where mscale_all_dim is set."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
