"""From what few tokens attended to, in latent space, to the FP8 input of the output projection, in one step.

  heads[t, h] = latents[t, h] . up_v[h], rounded to the dtype of the latents;
  values, scales = heads of a token side by side, rounded to FP8 in groups of 128, as in `fp8_quant`.

latents [T, H, C], up_v [H, C, V], both bfloat16 or both float32; H * V a multiple of 128 -> values [T, H * V]
float8_e4m3fn, scales [T, H * V / 128] float32. The Triton backend takes at most 16 tokens, and V = 128: a head is a
group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

MOST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_heads: int
    latent: int = 512
    dtype: torch.dtype = torch.bfloat16
    scale_ue8m0: bool = True


CASES = (
    Case("one_token", 1, 16),
    Case("released", 3, 128),
    Case("most_tokens", MOST_TOKENS, 8),
    Case("plain_scale", 5, 2, scale_ue8m0=False),
    Case("float32", 7, 4, latent=128, dtype=torch.float32),
    Case("no_tokens", 0, 4),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random latents and projections."""
    g = torch.Generator().manual_seed(case.num_tokens)
    up_v = torch.randn(case.num_heads, case.latent, fp8_quant.GROUP, generator=g) * case.latent**-0.5
    return {
        "latents": torch.randn(case.num_tokens, case.num_heads, case.latent, generator=g).to(case.dtype),
        "up_v": up_v.to(case.dtype),
        "scale_ue8m0": case.scale_ue8m0,
    }


def reference(latents: Tensor, up_v: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The contract in float64."""
    heads = torch.einsum("thc,hcv->thv", latents.double(), up_v.double()).to(latents.dtype)
    return fp8_quant.reference(heads.flatten(1), scale_ue8m0=scale_ue8m0)


def canonical(inputs: Any, outputs: list[Tensor]) -> list[Tensor]:
    """The numbers that values and scales stand for: another order of summation may round to another scale."""
    del inputs
    values, scales, *rest = outputs
    return [fp8_quant.dequantize_groups(values, scales), *rest]


OP = Op("value_quant", reference, CASES, make_inputs, canonical=canonical, bf16_error=2e-2, atol=2e-2, rtol=7e-2)


@OP.backend("torch")
def _torch(latents: Tensor, up_v: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    heads = torch.bmm(latents.transpose(0, 1), up_v).transpose(0, 1)
    return fp8_quant.quantize_groups(heads.flatten(1), scale_ue8m0=scale_ue8m0)


def _rejects_triton(latents: Tensor, up_v: Tensor, **_: Any) -> str | None:
    if latents.shape[0] > MOST_TOKENS:
        return f"it takes at most {MOST_TOKENS} tokens, not {latents.shape[0]}"
    if up_v.shape[2] != fp8_quant.GROUP or up_v.shape[1] % 64:
        return f"it takes values of {fp8_quant.GROUP} channels and latents of a multiple of 64, not {up_v.shape[1:]}"
    return None


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(latents: Tensor, up_v: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import value_quant as own

    return own.value_quant(latents, up_v, scale_ue8m0=scale_ue8m0)


def value_quant(latents: Tensor, up_v: Tensor, *, scale_ue8m0: bool, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(latents, up_v, scale_ue8m0=scale_ue8m0)
