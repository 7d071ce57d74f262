"""Orthonormal Walsh-Hadamard transform of the last axis.

y = x H / sqrt(N), H in Sylvester order (H[i, j] = (-1)^popcount(i & j)), N a power of two; computed in float32. The
deployed model rotates indexer queries and keys with it before rounding them to FP8: dot products stay, outliers spread.

x [..., N] float32 or bfloat16 -> [..., N] in x's dtype. ValueError if N is no power of two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: tuple[int, ...]


CASES = (
    Case("index_key", (5, 128)),
    Case("index_query", (3, 4, 32)),
    Case("one", (3, 1)),
    Case("two", (3, 2)),
    Case("no_tokens", (0, 8)),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random vectors."""
    return {"x": torch.randn(case.shape, generator=torch.Generator().manual_seed(0))}


def reference(x: Tensor) -> Tensor:
    """The contract, sign by sign."""
    width = x.shape[-1]
    out = torch.zeros(x.shape)
    for i in range(width):
        for j in range(width):
            sign = -1.0 if (i & j).bit_count() % 2 else 1.0
            out[..., j] += sign * x[..., i].float()
    return (out * width**-0.5).to(x.dtype)


OP = Op("hadamard", reference, CASES, make_inputs)


@functools.lru_cache(maxsize=8)
def _matrix(width: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@OP.backend("torch")
def _torch(x: Tensor) -> Tensor:
    width = x.shape[-1]
    return (x.float() @ _matrix(width, x.device) * width**-0.5).to(x.dtype)


def hadamard(x: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got a width of {width}")
    return OP.pick(backend)(x)
