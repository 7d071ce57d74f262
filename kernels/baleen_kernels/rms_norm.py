"""Root-mean-square norm of the last axis.

y = weight * x / sqrt(mean(x^2) + eps), without mean subtraction; statistics and product in float32.

x [..., N] float32 or bfloat16, weight [N] float32 -> [..., N] in x's dtype.
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
    scale: float = 1.0


CASES = (
    Case("vector", (7,)),
    Case("tokens", (5, 96)),
    Case("heads", (3, 4, 32)),
    Case("no_tokens", (0, 16)),
    Case("tiny_values", (4, 64), scale=1e-6),
    Case("large_values", (4, 64), scale=1e6),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random x of the case's scale and a weight around 1."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=g) * case.scale
    return {"x": x, "weight": 1 + 0.2 * torch.randn(case.shape[-1], generator=g), "eps": 1e-6}


def reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The contract, spelled out."""
    wide = x.float()
    return (weight * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


OP = Op("rms_norm", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(x, weight, eps=eps)
