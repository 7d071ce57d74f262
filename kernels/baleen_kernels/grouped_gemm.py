"""Matrix products of the experts: each row with the weight of its expert, block FP8 as in `fp8_gemm`.

masked_gemm: rows in a box per expert. values [E, M, K] float8_e4m3fn, scales [E, M, K / 128] float32, weight [E, N, K],
weight_scale [E, N / 128, K / 128], counts [E] int32 -> [E, M, N] in `dtype`. Rows from counts[e] on are not read, and
what is returned for them means nothing. Counts stay on the device, so a graph can hold the call. `expected_rows` is a
hint.
contiguous_gemm: rows of one expert after another. values [R, K], scales [R, K / 128], expert_of_row [R] int32, which
changes only at multiples of 128 or to -1, for rows without expert -> [R, N] in `dtype`, meaningless in such rows.
The dtype is bfloat16 or float32; libraries write bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import fp8_gemm, fp8_quant
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

SEGMENT = 128


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: tuple[int, ...]
    max_rows: int
    width: int = 256
    out_features: int = 384


CASES = (
    Case("ragged", (3, 0, 64, 1), 64),
    Case("released", (2, 1), 128, width=7168, out_features=256),
    Case("full", (128, 128), 128),
    Case("nothing", (0, 0, 0), 64),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random rows; NaN where no row is."""
    g = torch.Generator().manual_seed(len(case.name))
    experts = len(case.counts)
    values, scales = fp8_gemm.random_activations(experts, case.max_rows, case.width, g=g)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    scales[torch.arange(case.max_rows) >= counts[:, None]] = torch.nan
    weight, weight_scale = fp8_gemm.random_weight(experts, case.out_features, case.width, g=g)
    return {
        "values": values,
        "scales": scales,
        "weight": weight,
        "weight_scale": weight_scale,
        "counts": counts,
        "expected_rows": max(1, sum(case.counts) // experts),
    }


def reference(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    *,
    expected_rows: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The contract, expert by expert."""
    del expected_rows
    out = torch.zeros(*values.shape[:2], weight.shape[1], dtype=dtype)
    for e, count in enumerate(counts.tolist()):
        out[e, :count] = fp8_gemm.reference(
            values[e, :count], scales[e, :count], weight[e], weight_scale[e], dtype=dtype
        )
    return out


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    out, *rest = outputs
    unused = torch.arange(out.shape[1], device=out.device) >= inputs["counts"][:, None]
    return [out.masked_fill(unused[..., None], 0.0), *rest]


OP = Op("masked_gemm", reference, CASES, make_inputs, canonical=canonical)


@OP.backend("torch")
def _torch(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    *,
    expected_rows: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    del expected_rows
    out = torch.empty(*values.shape[:2], weight.shape[1], dtype=dtype, device=values.device)
    # On a GPU the counts stay where they are: rows without meaning cost time there and nothing else.
    used = [values.shape[1]] * len(values) if values.is_cuda else counts.tolist()
    for e, count in enumerate(used):
        if count:
            rows = values[e, :count], scales[e, :count]
            out[e, :count] = fp8_gemm.fp8_gemm(*rows, weight[e], weight_scale[e], dtype=dtype)
    return out


def _rejects_deep_gemm(dtype: torch.dtype = torch.bfloat16, **_: Any) -> str | None:
    return None if dtype == torch.bfloat16 else f"it writes bfloat16, not {dtype}"


@OP.backend("deep_gemm", needs=fp8_gemm.DEEP_GEMM, rejects=_rejects_deep_gemm)
def _deep_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    *,
    expected_rows: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    out = torch.empty(*values.shape[:2], weight.shape[1], dtype=dtype, device=values.device)
    deep_gemm.fp8_m_grouped_gemm_nt_masked((values, scales), (weight, weight_scale), out, counts, expected_rows)
    return out


def masked_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    counts: Tensor,
    *,
    expected_rows: int,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    inputs = values, scales, weight, weight_scale, counts
    return OP.pick(backend)(*inputs, expected_rows=expected_rows, dtype=dtype)


@dataclass(frozen=True, slots=True)
class ContiguousCase:
    name: str
    counts: tuple[int, ...]
    width: int = 256
    out_features: int = 384


CONTIGUOUS_CASES = (
    ContiguousCase("ragged", (3, 0, 130, 128)),
    ContiguousCase("one_expert", (1,)),
    ContiguousCase("released", (5, 7), width=7168, out_features=256),
)


def make_contiguous_inputs(case: ContiguousCase) -> dict[str, Any]:
    """Random rows, each expert's padded to whole segments."""
    g = torch.Generator().manual_seed(len(case.name))
    owners = []
    for e, count in enumerate(case.counts):
        owners += [e] * count + [-1] * (-count % SEGMENT)
    values, scales = fp8_gemm.random_activations(len(owners), case.width, g=g)
    weight, weight_scale = fp8_gemm.random_weight(len(case.counts), case.out_features, case.width, g=g)
    expert_of_row = torch.tensor(owners, dtype=torch.int32)
    return {
        "values": values,
        "scales": scales,
        "weight": weight,
        "weight_scale": weight_scale,
        "expert_of_row": expert_of_row,
    }


def contiguous_reference(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    expert_of_row: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The contract, expert by expert."""
    out = torch.zeros(values.shape[0], weight.shape[1], dtype=dtype)
    for e in expert_of_row.unique().tolist():
        rows = expert_of_row == e
        if e >= 0:
            one = fp8_quant.dequantize_groups(values[rows], scales[rows])
            out[rows] = (one @ fp8_quant.weight_reference(weight[e], weight_scale[e], dtype=torch.float32).T).to(dtype)
    return out


def contiguous_canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    out, *rest = outputs
    return [out.masked_fill((inputs["expert_of_row"] < 0)[:, None], 0.0), *rest]


CONTIGUOUS_OP = Op(
    "contiguous_gemm",
    contiguous_reference,
    CONTIGUOUS_CASES,
    make_contiguous_inputs,
    canonical=contiguous_canonical,
)


@CONTIGUOUS_OP.backend("torch")
def _contiguous_torch(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    expert_of_row: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    out = torch.empty(values.shape[0], weight.shape[1], dtype=dtype, device=values.device)
    for e in range(weight.shape[0]):
        rows = expert_of_row == e
        out[rows] = fp8_gemm.fp8_gemm(values[rows], scales[rows], weight[e], weight_scale[e], dtype=dtype)
    return out


@CONTIGUOUS_OP.backend("deep_gemm", needs=fp8_gemm.DEEP_GEMM, rejects=_rejects_deep_gemm)
def _contiguous_deep_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    expert_of_row: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    out = torch.empty(values.shape[0], weight.shape[1], dtype=dtype, device=values.device)
    if values.shape[0]:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((values, scales), (weight, weight_scale), out, expert_of_row)
    return out


def contiguous_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    expert_of_row: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return CONTIGUOUS_OP.pick(backend)(values, scales, weight, weight_scale, expert_of_row, dtype=dtype)
