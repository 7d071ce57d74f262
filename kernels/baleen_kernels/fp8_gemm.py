"""Matrix product of FP8 activations with block-FP8 weights.

  out[t, n] = sum over blocks b of 128 channels: scales[t, b] * weight_scale[n // 128, b] * (values[t, b] . weight[n,
b])

values [T, K] float8_e4m3fn, scales [T, K / 128] float32, as `fp8_quant` makes them; weight [N, K] float8_e4m3fn,
weight_scale [ceil(N / 128), K / 128] float32; K a multiple of 128 -> [T, N] in `dtype`, bfloat16 or float32, sums in
float32. Libraries write bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant
from baleen_kernels.machine import HOPPER, Needs
from baleen_kernels.registry import Op

DEEP_GEMM = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("deep_gemm",), tools=("nvcc",))


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    width: int
    out_features: int
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("one_token", 1, 512, 256),
    Case("tokens", 37, 256, 384),
    Case("partial_tile", 5, 512, 576),
    Case("released", 3, 7168, 2112),
    Case("no_tokens", 0, 256, 256),
    Case("float32", 5, 256, 192, dtype=torch.float32),
)


def random_weight(*shape: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """[..., N, K] random numbers of the size of trained weights in block FP8, with uneven scales."""
    weight = (100 * torch.randn(shape, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // fp8_quant.TILE), -(-shape[-1] // fp8_quant.TILE))
    return weight, (0.5 + torch.rand(grid, generator=g)) / (100 * shape[-1] ** 0.5)


def random_activations(*shape: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """[..., K] random numbers rounded to FP8: values and scales."""
    return fp8_quant.quantize_groups(torch.randn(shape, generator=g), scale_ue8m0=True)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random activations and weight."""
    g = torch.Generator().manual_seed(case.num_tokens)
    values, scales = random_activations(case.num_tokens, case.width, g=g)
    weight, weight_scale = random_weight(case.out_features, case.width, g=g)
    return {"values": values, "scales": scales, "weight": weight, "weight_scale": weight_scale, "dtype": case.dtype}


def reference(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The contract on dequantised numbers."""
    wide = fp8_quant.weight_reference(weight, weight_scale, dtype=torch.float32)
    return (fp8_quant.dequantize_groups(values, scales) @ wide.T).to(dtype)


OP = Op("fp8_gemm", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    wide = fp8_quant.dequantize_weight(weight, weight_scale, dtype=torch.float32)
    return torch.nn.functional.linear(fp8_quant.dequantize_groups(values, scales), wide).to(dtype)


def _rejects_deep_gemm(values: Tensor, weight: Tensor, dtype: torch.dtype, **_: Any) -> str | None:
    if dtype != torch.bfloat16:
        return f"it writes bfloat16, not {dtype}"
    if weight.shape[0] % 64:
        return f"it takes a multiple of 64 output channels, not {weight.shape[0]}"
    return None if values.is_contiguous() else "activations must be contiguous"


@OP.backend("deep_gemm", needs=DEEP_GEMM, rejects=_rejects_deep_gemm)
def _deep_gemm(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    out = torch.empty(values.shape[0], weight.shape[0], dtype=dtype, device=values.device)
    if values.shape[0]:
        deep_gemm.fp8_gemm_nt((values, scales), (weight, weight_scale), out)
    return out


def fp8_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring. ValueError if the shapes do not go together."""
    if values.shape[1] != weight.shape[1] or values.shape[1] % fp8_quant.GROUP:
        raise ValueError(f"activations {tuple(values.shape)} do not go with a weight {tuple(weight.shape)}")
    return OP.pick(backend)(values, scales, weight, weight_scale, dtype=dtype)
