"""Gated activation and rounding to FP8 in one step, between the two grouped matrix products of the experts.

  y = silu(gate) * up, product in float32, rounded to the dtype of gate_up;  values, scales = y rounded to FP8 in groups
  of 128, as in `fp8_quant`.

gate_up [E, M, 2 N], float32 or bfloat16, gate in the first N channels; N a multiple of 128; counts [E] int32: rows in
use for each expert, or None if all are -> values [E, M, N] float8_e4m3fn, scales [E, M, N / 128] float32. Rows from
counts[e] on are not read, and what is returned for them means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, swiglu
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: tuple[int, ...] | None
    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.bfloat16
    scale_ue8m0: bool = True


CASES = (
    Case("all_rows", None, (1, 5, 512)),
    Case("ragged", (3, 0, 7, 1), (4, 7, 512)),
    Case("released", (2, 1), (2, 2, 4096)),
    Case("plain_scale", (2, 3), (2, 3, 256), scale_ue8m0=False),
    Case("float32", None, (2, 3, 256), dtype=torch.float32),
    Case("no_rows", (0, 0), (2, 3, 256)),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random activations; NaN in the rows that are not in use."""
    g = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(case.shape, generator=g)
    counts = None
    if case.counts is not None:
        counts = torch.tensor(case.counts, dtype=torch.int32)
        gate_up[torch.arange(case.shape[1]) >= counts[:, None]] = torch.nan
    return {"gate_up": gate_up.to(case.dtype), "counts": counts, "scale_ue8m0": case.scale_ue8m0}


def reference(gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The contract, expert by expert."""
    experts, rows, width = gate_up.shape
    values = torch.zeros(experts, rows, width // 2, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(experts, rows, width // 2 // fp8_quant.GROUP)
    for e in range(experts):
        used = rows if counts is None else int(counts[e])
        gate, up = gate_up[e, :used].chunk(2, -1)
        values[e, :used], scales[e, :used] = fp8_quant.reference(swiglu.reference(gate, up), scale_ue8m0=scale_ue8m0)
    return values, scales


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    counts, (values, scales, *rest) = inputs["counts"], outputs
    if counts is None:
        return outputs
    unused = (torch.arange(values.shape[1], device=values.device) >= counts[:, None])[..., None]
    return [values.view(torch.uint8).masked_fill(unused, 0).view(values.dtype), scales.masked_fill(unused, 0.0), *rest]


OP = Op("swiglu_quant", reference, CASES, make_inputs, byte_flips=0.02, canonical=canonical)


@OP.backend("torch")
def _torch(gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, -1)
    return fp8_quant.quantize_groups(swiglu.swiglu(gate, up), scale_ue8m0=scale_ue8m0)


@OP.backend("triton", needs=TRITON)
def _triton(gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import swiglu_quant as own

    return own.swiglu_quant(gate_up, counts, scale_ue8m0=scale_ue8m0)


def swiglu_quant(
    gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """See the module docstring. ValueError if N is no multiple of 128."""
    if gate_up.shape[-1] % (2 * fp8_quant.GROUP):
        raise ValueError(f"gate and up of {gate_up.shape[-1]} channels do not split into groups of {fp8_quant.GROUP}")
    return OP.pick(backend)(gate_up, counts, scale_ue8m0=scale_ue8m0)
