"""Rotary position embedding: rotates pairs of channels by an angle.

(a, b) -> (a cos - b sin, a sin + b cos), in float32. Which channels make pair i of d is a convention that both
attention and indexer need, each the other one: `rope_interleaved=True` pairs (2i, 2i + 1), as the main attention
does; False pairs (i, i + d/2), as the lightning indexer does. Rotated channels stay where they were.

x [T, heads, d] float32 or bfloat16, cos and sin [T, d/2] float32 -> [T, heads, d] in x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_heads: int
    width: int
    rope_interleaved: bool


CASES = (
    Case("interleaved", 5, 3, 16, True),
    Case("half_split", 5, 3, 16, False),
    Case("one_pair", 2, 1, 2, True),
    Case("one_pair_half_split", 2, 1, 2, False),
    Case("no_tokens", 0, 2, 8, True),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random vectors and angles."""
    g = torch.Generator().manual_seed(0)
    angle = 10 * torch.randn(case.num_tokens, case.width // 2, generator=g)
    x = torch.randn(case.num_tokens, case.num_heads, case.width, generator=g)
    return {"x": x, "cos": angle.cos(), "sin": angle.sin(), "rope_interleaved": case.rope_interleaved}


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool) -> Tensor:
    """The contract, pair by pair."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if rope_interleaved else (pair, pair + half)
        a, b = x[..., first].float(), x[..., second].float()
        c, s = cos[:, pair, None], sin[:, pair, None]
        out[..., first] = a * c - b * s
        out[..., second] = a * s + b * c
    return out


OP = Op("rope", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool) -> Tensor:
    wide = x.float()
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, d/2]
    if rope_interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return rotated.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, rope_interleaved: bool, backend: str = "torch") -> Tensor:
    """See the module docstring. The pairing has no default on purpose."""
    return OP.pick(backend)(x, cos, sin, rope_interleaved=rope_interleaved)
