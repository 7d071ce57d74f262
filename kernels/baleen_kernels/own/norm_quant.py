"""Triton: residual addition, RMS norm and rounding to FP8, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    UE8M0: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < WIDTH
    x = tl.load(residual + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
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
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_DELTA=delta is not None,
            UE8M0=scale_ue8m0,
            num_warps=16 if width >= 4096 else 4,
        )
    return y, values, scales
