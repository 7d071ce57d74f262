"""What experts return, put together, added to the residual stream, normed and rounded: `moe_combine` and `norm_quant`
as one step of few tokens.

  delta[t] = sum_j weights[t, j] * rows[t * k + j] + shared[t], in float32, j ascending, rounded to that dtype;
  then as in `norm_quant`.

residual [T, N], float32 or bfloat16, changed in place; rows [T * k, N] of its dtype; weights [T, k] float32; shared
[T, N] of its dtype, or None where it is among the rows; weight [N] float32; N a multiple of 128 -> y [T, N], values
[T, N] float8_e4m3fn, scales [T, N / 128] float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, moe_permute, norm_quant
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    width: int
    picks: int
    dtype: torch.dtype = torch.bfloat16
    has_shared: bool = False
    scale_ue8m0: bool = True


CASES = (
    Case("released", 3, 7168, 9),
    Case("shared_apart", 3, 7168, 8, has_shared=True),
    Case("plain_scale", 2, 256, 3, scale_ue8m0=False),
    Case("odd_width", 5, 384, 2, has_shared=True),
    Case("float32", 5, 256, 5, dtype=torch.float32),
    Case("no_tokens", 0, 256, 2),
    Case("many_tokens", 40, 512, 3),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random streams and rows."""
    g = torch.Generator().manual_seed(case.picks)
    shape = (case.num_tokens, case.width)
    return {
        "residual": torch.randn(shape, generator=g).to(case.dtype),
        "rows": torch.randn(case.num_tokens * case.picks, case.width, generator=g).to(case.dtype),
        "weights": torch.rand(case.num_tokens, case.picks, generator=g),
        "shared": torch.randn(shape, generator=g).to(case.dtype) if case.has_shared else None,
        "weight": 1 + 0.2 * torch.randn(case.width, generator=g),
        "eps": 1e-6,
        "scale_ue8m0": case.scale_ue8m0,
    }


def _delta(residual: Tensor, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    return moe_permute.combine_reference(rows, None, weights, torch.zeros_like(residual) if shared is None else shared)


def reference(
    residual: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract, through those of its parts."""
    delta = _delta(residual, rows, weights, shared)
    return norm_quant.reference(residual, delta, weight, eps=eps, scale_ue8m0=scale_ue8m0)


OP = Op("combine_norm", reference, CASES, make_inputs, byte_flips=0.02)


@OP.backend("torch")
def _torch(
    residual: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    beside = torch.zeros_like(residual) if shared is None else shared
    delta = moe_permute.moe_combine(rows, None, weights, beside)
    return norm_quant.norm_quant(residual, delta, weight, eps=eps, scale_ue8m0=scale_ue8m0)


@OP.backend("triton", needs=TRITON)
def _triton(
    residual: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from baleen_kernels.own import norm_quant as own

    return own.combine_norm(residual, rows, weights, shared, weight, eps=eps, scale_ue8m0=scale_ue8m0)


def combine_norm(
    residual: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module docstring. ValueError if N is no multiple of 128."""
    if residual.shape[-1] % fp8_quant.GROUP:
        raise ValueError(f"FP8 groups have {fp8_quant.GROUP} channels, which does not divide {residual.shape[-1]}")
    return OP.pick(backend)(residual, rows, weights, shared, weight, eps=eps, scale_ue8m0=scale_ue8m0)
