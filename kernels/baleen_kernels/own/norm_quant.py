"""Triton: residual addition, RMS norm and rounding to FP8, one program a row. What is added is a row, or what experts
returned for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baleen_kernels.own import dependent_launch
from baleen_kernels.own.fp8 import GROUP, column_scales, narrow, scale_of, to_e4m3


@triton.jit
def _norm_quant(
    residual,
    delta,
    weight,
    y,
    values,
    scales,
    scale_stride,
    eps,
    rows,
    pick_weights,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PICKS: tl.constexpr,
    UE8M0: tl.constexpr,
    EARLY: tl.constexpr,
):
    dependent_launch.release(EARLY)
    dependent_launch.wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < WIDTH
    x = tl.load(residual + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros_like(x)
    for pick in tl.static_range(PICKS):
        place = row * PICKS + pick
        returned = tl.load(rows + place * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        added += tl.load(pick_weights + place) * returned
    if HAS_DELTA:
        added += tl.load(delta + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA or PICKS > 0:
        x += narrow(added, residual.dtype.element_ty).to(tl.float32)
        rounded = narrow(x, residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = 1 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 1), 0) / WIDTH + eps)
    normed = tl.load(weight + column, mask=mask, other=0.0) * (x * inverse)
    rounded = narrow(normed, y.dtype.element_ty)
    tl.store(y + row * WIDTH + column, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(wide), 1), UE8M0)
    tl.store(scales + group * scale_stride + row, scale, mask=group < WIDTH // GROUP)
    tl.store(values + row * WIDTH + column, to_e4m3(wide, scale[:, None], UE8M0), mask=mask)


def norm_quant(
    residual: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, scale_ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.norm_quant`; streams are contiguous."""
    return _launch(residual, delta, None, None, weight, eps, scale_ue8m0)


def combine_norm(
    residual: Tensor,
    rows: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.combine_norm`; streams are contiguous."""
    assert rows.is_contiguous()
    assert weights.is_contiguous()
    return _launch(residual, shared, rows, weights, weight, eps, scale_ue8m0)


def _launch(
    residual: Tensor,
    delta: Tensor | None,
    rows: Tensor | None,
    pick_weights: Tensor | None,
    weight: Tensor,
    eps: float,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = residual.shape
    assert residual.is_contiguous()
    assert delta is None or delta.is_contiguous()
    y = torch.empty_like(residual)
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=residual.device)
    scales = column_scales(num_rows, width // 128, residual.device)
    if num_rows:
        _norm_quant[(num_rows,)](
            residual,
            residual if delta is None else delta,
            weight,
            y,
            values,
            scales,
            scales.stride(1),
            eps,
            residual if rows is None else rows,
            weight if pick_weights is None else pick_weights,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_DELTA=delta is not None,
            PICKS=0 if pick_weights is None else pick_weights.shape[1],
            UE8M0=scale_ue8m0,
            num_warps=16 if width >= 4096 else 4,
            **dependent_launch.options(residual, when=num_rows <= dependent_launch.MOST_ROWS),
        )
    return y, values, scales
