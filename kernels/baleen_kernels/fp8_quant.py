"""FP8 rounding: activations in groups of 128 channels, weights in tiles of 128 x 128.

Activations. For each group of 128 consecutive channels of a token (one group if there are fewer than 128):
  a = max(max|x|, 1e-4), s = a * (1 / 448), values = e4m3(clamp(x / s, -448, 448)), nearest, ties to even.
  With `scale_ue8m0`, s is rounded up to a power of two, 2^ceil(log2 s), found from the exponent bits: log2 and ceil in
  float32 come out one too low just above a power of two.
quantize_groups: x [..., N] float32 or bfloat16 -> values [..., N] float8_e4m3fn, scales [..., G] float32. ValueError if
N is above 128 and no multiple of it.

Weights. dequantize_weight: weight [out, in] float8_e4m3fn, scale_inv [ceil(out/128), ceil(in/128)] float32
-> weight * scale of its tile (row // 128, column // 128) in the given dtype. The scale multiplies, despite its name in
checkpoints; it need not be a power of two; last tiles may be partial. The tile is 128, never inferred from shapes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

GROUP = 128
TILE = 128
E4M3_MAX = 448.0
MIN_AMAX = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """`values` "edges" puts group maxima at and around powers of two times 448."""

    name: str
    shape: tuple[int, ...]
    scale_ue8m0: bool
    values: str = "normal"


CASES = (
    Case("power_of_two", (5, 256), True),
    Case("plain_scale", (5, 256), False),
    Case("heads", (3, 4, 128), True),
    Case("narrow", (5, 32), True),
    Case("zeros", (2, 128), True, values="zeros"),
    Case("zeros_plain_scale", (2, 128), False, values="zeros"),
    Case("tiny", (4, 128), True, values="tiny"),
    Case("edges", (64, 128), True, values="edges"),
    Case("no_tokens", (0, 128), True),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Activations of the case's kind."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(case.shape, generator=g)
    if case.values == "zeros":
        x = torch.zeros(case.shape)
    elif case.values == "tiny":
        x = x * 1e-7
    elif case.values == "edges":
        top = 448.0 * 2.0 ** torch.arange(-8, 8).repeat(4).float()
        for _ in range(3):
            top[16:32] = torch.nextafter(top[16:32], torch.tensor(torch.inf))
            top[32:48] = torch.nextafter(top[32:48], torch.tensor(0.0))
        x = x.clamp(-1, 1) * top[:, None]
        x[:, 5] = top
    return {"x": x, "scale_ue8m0": case.scale_ue8m0}


def reference(x: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The contract: scales by exact comparison with powers of two, values by search among all e4m3 numbers."""
    groups = _groups(x).float()
    scales = groups.abs().amax(-1).clamp(min=MIN_AMAX) * (1 / E4M3_MAX)
    if scale_ue8m0:
        powers = 2.0 ** torch.arange(-40, 128, dtype=torch.float64)
        scales = powers[torch.searchsorted(powers, scales.double())].float()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX).double()
    distance = (exact[..., None] - table.double()).abs().nan_to_num(nan=torch.inf)
    # Among equally near numbers the even mantissa wins: odd codes get a distance that is larger by less than any gap.
    distance += (torch.arange(256) % 2) * 1e-12
    values = distance.argmin(-1).to(torch.uint8).view(torch.float8_e4m3fn)
    return values.flatten(-2), scales


OP = Op("fp8_quant", reference, CASES, make_inputs, atol=0, rtol=0)


def _groups(x: Tensor) -> Tensor:
    width = x.shape[-1]
    if width > GROUP and width % GROUP:
        raise ValueError(f"FP8 groups have {GROUP} channels, which does not divide a width of {width}")
    size = min(GROUP, width)
    return x.unflatten(-1, (width // size, size))


@OP.backend("torch")
def _torch(x: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    groups = _groups(x).float()
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX) * (1 / E4M3_MAX)
    if scale_ue8m0:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1); 0.5 means a power of two already
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    values = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # Through flatten, so that strides are plain also for empty and one-group shapes: packers look at the bytes.
    return values.flatten(-2), scales.flatten().view(groups.shape[:-1])


def _rejects_triton(x: Tensor, **_: Any) -> str | None:
    if x.dim() != 2 or x.shape[1] % GROUP:
        return f"it takes [T, N] with N a multiple of {GROUP}, not {tuple(x.shape)}"
    return None if x.stride(1) == 1 else "the channels of a token must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(x: Tensor, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import fp8

    return fp8.quantize(x, scale_ue8m0=scale_ue8m0)


def quantize_groups(x: Tensor, *, scale_ue8m0: bool, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(x, scale_ue8m0=scale_ue8m0)


def dequantize_groups(values: Tensor, scales: Tensor) -> Tensor:
    """values [..., N] float8_e4m3fn, scales [..., G] float32 -> [..., N] float32."""
    num_groups = scales.shape[-1]
    groups = e4m3_to_float(values).unflatten(-1, (num_groups, values.shape[-1] // num_groups))
    return (groups * scales[..., None]).flatten(-2)


@functools.cache
def _e4m3_numbers() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def e4m3_to_float(values: Tensor) -> Tensor:
    """float8_e4m3fn -> float32 of the same shape, exactly, NaN included."""
    if values.device.type != "cpu":
        return values.float()
    # On a CPU looking the 256 numbers up takes a seventh of the time that converting does.
    codes = values.contiguous().view(torch.uint8).flatten().int()
    return _e4m3_numbers().index_select(0, codes).view(values.shape)


def round_groups(x: Tensor, *, scale_ue8m0: bool, backend: str = "torch") -> Tensor:
    """What is left of x after quantizing and dequantizing, float32."""
    return dequantize_groups(*quantize_groups(x, scale_ue8m0=scale_ue8m0, backend=backend))


@dataclass(frozen=True, slots=True)
class WeightCase:
    name: str
    shape: tuple[int, int]


WEIGHT_CASES = (
    WeightCase("whole_tiles", (256, 384)),
    WeightCase("partial_rows", (192, 128)),
    WeightCase("partial_columns", (128, 200)),
    WeightCase("partial_both", (130, 300)),
    WeightCase("below_one_tile", (5, 7)),
)


def make_weight_inputs(case: WeightCase) -> dict[str, Any]:
    """Random e4m3 values and uneven tile scales, none a power of two."""
    g = torch.Generator().manual_seed(0)
    rows, columns = case.shape
    grid = (-(-rows // TILE), -(-columns // TILE))
    return {
        "weight": (100 * torch.randn(rows, columns, generator=g)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn),
        "scale_inv": 1.3 * torch.rand(grid, generator=g) + 0.01,
        "dtype": torch.float32,
    }


def weight_reference(weight: Tensor, scale_inv: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The contract, tile by tile."""
    out = torch.empty(weight.shape, dtype=dtype)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            tile = slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE)
            out[tile] = (weight[tile].float() * scale_inv[i, j]).to(dtype)
    return out


WEIGHT_OP = Op("fp8_dequantize_weight", weight_reference, WEIGHT_CASES, make_weight_inputs, atol=0, rtol=0)


@WEIGHT_OP.backend("torch")
def _weight_torch(weight: Tensor, scale_inv: Tensor, *, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.shape
    scales = scale_inv.float().repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return (e4m3_to_float(weight) * scales).to(dtype)


def dequantize_weight(weight: Tensor, scale_inv: Tensor, *, dtype: torch.dtype, backend: str = "torch") -> Tensor:
    """See the module docstring. ValueError if the scale grid does not fit the weight."""
    grid = tuple(-(-size // TILE) for size in weight.shape)
    if tuple(scale_inv.shape) != grid:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} needs scales {grid}, got {tuple(scale_inv.shape)}")
    return WEIGHT_OP.pick(backend)(weight, scale_inv, dtype=dtype)
