"""Gated activation: silu(gate) * up, with silu(v) = v * sigmoid(v), product in float32.

gate and up [..., N] of one dtype, float32 or bfloat16 -> [..., N] in that dtype.
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


CASES = (Case("tokens", (5, 48)), Case("no_tokens", (0, 48)), Case("saturated", (3, 16), scale=100.0))


def make_inputs(case: Case) -> dict[str, Any]:
    """Random gate and up values of the case's scale."""
    g = torch.Generator().manual_seed(0)
    gate, up = (case.scale * torch.randn(case.shape, generator=g) for _ in range(2))
    return {"gate": gate, "up": up}


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """The contract, spelled out."""
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up.float()).to(gate.dtype)


OP = Op("swiglu", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(gate, up)
