"""Triton: gated activation and rounding to FP8. Programs walk over rows in use; others cost a look at a count."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own.fp8 import GROUP, narrow, scale_of, to_e4m3


@triton.jit
def _swiglu_quant(
    gate_up,
    counts,
    expert_of_row,
    values,
    scales,
    num_rows,
    expert_stride,
    group_stride,
    WIDTH: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNS: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    used = num_rows
    if HAS_COUNTS:
        used = tl.load(counts + expert)
    groups = tl.program_id(2) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = columns < WIDTH
    for turn in range(TURNS):
        first = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS
        if first < used:
            rows = first + tl.arange(0, ROWS)
            present = rows < used
            if HAS_OWNERS:
                present = tl.load(expert_of_row + rows, mask=present, other=-1) >= 0
            mask = present[:, None, None] & inside
            place = (expert * num_rows + rows[:, None, None]) * (2 * WIDTH) + columns
            gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up + place + WIDTH, mask=mask, other=0.0).to(tl.float32)
            y = narrow(tl.div_rn(gate, 1 + tl.exp(-gate)) * up, gate_up.dtype.element_ty).to(tl.float32)
            scale = scale_of(tl.max(tl.abs(y), 2), UE8M0)
            fp8 = to_e4m3(y, scale[:, :, None], UE8M0)
            tl.store(values + (expert * num_rows + rows[:, None, None]) * WIDTH + columns, fp8, mask=mask)
            scale_place = expert * expert_stride + groups[None, :] * group_stride + rows[:, None]
            tl.store(scales + scale_place, scale, mask=present[:, None] & (groups < WIDTH // GROUP)[None, :])


def swiglu_quant(
    gate_up: Tensor, counts: Tensor | None, expert_of_row: Tensor | None, *, scale_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.swiglu_quant`; scales in the layout of `own.fp8`, expert by expert."""
    experts, num_rows, width = gate_up.shape
    assert gate_up.is_contiguous()
    width //= 2
    padded = -(-num_rows // 4) * 4
    values = torch.empty(experts, num_rows, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(experts, width // 128, padded, dtype=torch.float32, device=gate_up.device)
    scales = scales.transpose(1, 2)[:, :num_rows]
    if num_rows:
        # Where counts are on the device, few programs walk over all rows that there might be.
        rows = 1 if num_rows <= 64 or counts is not None else 4
        blocks = triton.cdiv(num_rows, rows) if counts is None else min(num_rows, 8)
        grid = (blocks, experts, triton.cdiv(width, 512))
        _swiglu_quant[grid](
            gate_up,
            gate_up if counts is None else counts,
            gate_up if expert_of_row is None else expert_of_row,
            values,
            scales,
            num_rows,
            scales.stride(0),
            scales.stride(2),
            WIDTH=width,
            HAS_COUNTS=counts is not None,
            HAS_OWNERS=expert_of_row is not None,
            UE8M0=scale_ue8m0,
            ROWS=rows,
            GROUPS=4,
            TURNS=triton.cdiv(num_rows, rows * blocks),
            num_warps=4,
        )
    return values, scales
