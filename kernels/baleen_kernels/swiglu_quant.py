"""Gated activation and rounding to FP8 in one step, between the two grouped matrix products of the experts.

  y = silu(gate) * up, product in float32, rounded to the dtype of gate_up;  values, scales = y rounded to FP8 in groups
  of 128, as in `fp8_quant`.

gate_up [E, M, 2 N], float32 or bfloat16, gate in the first N channels; N a multiple of 128; counts [E] int32: rows in
use for each expert, or None if all are; or, of E = 1, expert_of_row [M] int32 as of `moe_segments`, -1 in rows without
one -> values [E, M, N] float8_e4m3fn, scales [E, M, N / 128] float32. Rows from counts[e] on, or without an expert, are
not read, and what is returned for them means nothing.
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
    """`owned`: whether each row has an expert, over and over."""

    name: str
    counts: tuple[int, ...] | None
    shape: tuple[int, int, int]
    owned: tuple[bool, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    scale_ue8m0: bool = True


CASES = (
    Case("all_rows", None, (1, 5, 512)),
    Case("ragged", (3, 0, 7, 1), (4, 7, 512)),
    Case("released", (2, 1), (2, 2, 4096)),
    Case("plain_scale", (2, 3), (2, 3, 256), scale_ue8m0=False),
    Case("float32", None, (2, 3, 256), dtype=torch.float32),
    Case("no_rows", (0, 0), (2, 3, 256)),
    Case("segments", None, (1, 70, 512), owned=(True, True, False, True, False)),
    Case("empty_segments", None, (1, 9, 256), owned=(False,)),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random activations; NaN in the rows that are not in use."""
    g = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(case.shape, generator=g)
    counts = None
    if case.counts is not None:
        counts = torch.tensor(case.counts, dtype=torch.int32)
    inputs: dict[str, Any] = {"counts": counts, "scale_ue8m0": case.scale_ue8m0}
    if counts is not None:
        gate_up[~_used(case.shape[1], counts, None)] = torch.nan
    if case.owned is not None:
        owned = torch.tensor(case.owned).repeat(case.shape[1])[: case.shape[1]]
        inputs["expert_of_row"] = torch.where(owned, 3, -1).int()
        gate_up[:, ~owned] = torch.nan
    return {"gate_up": gate_up.to(case.dtype), **inputs}


def _used(num_rows: int, counts: Tensor | None, expert_of_row: Tensor | None) -> Tensor:
    """[E or 1, M]: which rows mean something."""
    if counts is not None:
        return torch.arange(num_rows, device=counts.device) < counts[:, None]
    return torch.ones(1, num_rows, dtype=torch.bool) if expert_of_row is None else (expert_of_row >= 0)[None]


def reference(
    gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool, expert_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The contract, row by row."""
    experts, num_rows, width = gate_up.shape
    values = torch.zeros(experts, num_rows, width // 2, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(experts, num_rows, width // 2 // fp8_quant.GROUP)
    for e, row in _used(num_rows, counts, expert_of_row).expand(experts, -1).nonzero().tolist():
        gate, up = gate_up[e, row].chunk(2, -1)
        y = swiglu.reference(gate, up)[None]
        (values[e, row],), (scales[e, row],) = fp8_quant.reference(y, scale_ue8m0=scale_ue8m0)
    return values, scales


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    values, scales, *rest = outputs
    used = _used(values.shape[1], inputs["counts"], inputs.get("expert_of_row"))
    unused = ~used.to(values.device)[..., None]
    return [values.view(torch.uint8).masked_fill(unused, 0).view(values.dtype), scales.masked_fill(unused, 0.0), *rest]


OP = Op("swiglu_quant", reference, CASES, make_inputs, byte_flips=0.02, canonical=canonical)


@OP.backend("torch")
def _torch(
    gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool, expert_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    del counts, expert_of_row  # rows without meaning cost time and nothing else
    gate, up = gate_up.chunk(2, -1)
    return fp8_quant.quantize_groups(swiglu.swiglu(gate, up), scale_ue8m0=scale_ue8m0)


@OP.backend("triton", needs=TRITON)
def _triton(
    gate_up: Tensor, counts: Tensor | None, *, scale_ue8m0: bool, expert_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import swiglu_quant as own

    return own.swiglu_quant(gate_up, counts, expert_of_row, scale_ue8m0=scale_ue8m0)


def swiglu_quant(
    gate_up: Tensor,
    counts: Tensor | None,
    *,
    scale_ue8m0: bool,
    expert_of_row: Tensor | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring. ValueError if N is no multiple of 128, or rows are told apart in both ways."""
    if expert_of_row is not None and (counts is not None or gate_up.shape[0] != 1):
        raise ValueError("expert_of_row tells rows of one matrix apart, without counts")
    if gate_up.shape[-1] % (2 * fp8_quant.GROUP):
        raise ValueError(f"gate and up of {gate_up.shape[-1]} channels do not split into groups of {fp8_quant.GROUP}")
    return OP.pick(backend)(gate_up, counts, scale_ue8m0=scale_ue8m0, expert_of_row=expert_of_row)
