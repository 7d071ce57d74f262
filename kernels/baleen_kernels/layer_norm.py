"""Layer norm of the last axis, with mean subtraction, weight and bias.

y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias; statistics and product in float32. The lightning indexer norms
its keys with it: a true LayerNorm where the rest of the model uses RMS norms.

x [..., N] float32 or bfloat16, weight [N] and bias [N] float32 -> [..., N] in x's dtype.
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
    shape: tuple[int, ...]
    offset: float = 0.0


CASES = (
    Case("vector", (8,)),
    Case("tokens", (5, 128)),
    Case("offset", (5, 128), offset=10.0),
    Case("no_tokens", (0, 16)),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random x around the case's offset."""
    g = torch.Generator().manual_seed(0)
    width = case.shape[-1]
    return {
        "x": torch.randn(case.shape, generator=g) + case.offset,
        "weight": 1 + 0.2 * torch.randn(width, generator=g),
        "bias": 0.2 * torch.randn(width, generator=g),
        "eps": 1e-6,
    }


def reference(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """The contract, spelled out."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    return (weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias).to(x.dtype)


OP = Op("layer_norm", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(x, weight, bias, eps=eps)
