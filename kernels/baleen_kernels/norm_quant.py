"""Residual addition, RMS norm and rounding to FP8 in one step: what stands between two blocks of a layer.

  residual += delta, rounded to its dtype;  y = weight * residual / sqrt(mean(residual^2) + eps), rounded to that dtype;
  values, scales = y rounded to FP8 in groups of 128, as in `fp8_quant`.

residual [T, N], float32 or bfloat16, changed in place; delta [T, N] of its dtype, or None for nothing to add; weight
[N] float32; N a multiple of 128 -> y [T, N], values [T, N] float8_e4m3fn, scales [T, N / 128] float32. Statistics in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, rms_norm
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    has_delta: bool = True
    scale_ue8m0: bool = True


CASES = (
    Case("released", 3, 7168),
    Case("first_layer", 3, 7168, has_delta=False),
    Case("plain_scale", 2, 256, scale_ue8m0=False),
    Case("odd_width", 5, 384),
    Case("float32", 5, 256, dtype=torch.float32),
    Case("no_tokens", 0, 256),
    Case("many_tokens", 40, 1536),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random streams; a row whose groups differ in size by orders of magnitude."""
    g = torch.Generator().manual_seed(0)
    shape = (case.num_tokens, case.width)
    residual = torch.randn(shape, generator=g)
    residual[:1, :128] *= 300
    return {
        "residual": residual.to(case.dtype),
        "delta": torch.randn(shape, generator=g).to(case.dtype) if case.has_delta else None,
        "weight": 1 + 0.2 * torch.randn(case.width, generator=g),
        "eps": 1e-6,
        "scale_ue8m0": case.scale_ue8m0,
    }


def reference(
    residual: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, scale_ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract, through those of its parts."""
    if delta is not None:
        residual.copy_((residual.float() + delta.float()).to(residual.dtype))
    y = rms_norm.reference(residual, weight, eps=eps)
    return y, *fp8_quant.reference(y, scale_ue8m0=scale_ue8m0)


OP = Op("norm_quant", reference, CASES, make_inputs, byte_flips=0.02)


@OP.backend("torch")
def _torch(
    residual: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, scale_ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if delta is not None:
        residual += delta
    y = rms_norm.rms_norm(residual, weight, eps=eps)
    return y, *fp8_quant.quantize_groups(y, scale_ue8m0=scale_ue8m0)


@OP.backend("triton", needs=TRITON)
def _triton(
    residual: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, scale_ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from baleen_kernels.own import norm_quant as own

    return own.norm_quant(residual, delta, weight, eps=eps, scale_ue8m0=scale_ue8m0)


def norm_quant(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module docstring. ValueError if N is no multiple of 128."""
    if residual.shape[-1] % fp8_quant.GROUP:
        raise ValueError(f"FP8 groups have {fp8_quant.GROUP} channels, which does not divide {residual.shape[-1]}")
    return OP.pick(backend)(residual, delta, weight, eps=eps, scale_ue8m0=scale_ue8m0)
