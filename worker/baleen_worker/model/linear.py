"""Weights and how they are applied: linears (plain or block FP8), norms, embedding.

Parameters are created empty, without gradient, on torch's current default device: under `torch.device("meta")` nothing
is allocated and a loader assigns the tensors. A parameter's dtype is the one the loader has to convert to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.fp8_quant import TILE, dequantize_weight, round_groups
from baleen_kernels.layer_norm import layer_norm
from baleen_kernels.rms_norm import rms_norm
from torch import Tensor, nn

if TYPE_CHECKING:
    from baleen_worker.model.numerics import Numerics


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x [..., in] -> x W^T [..., out], in x's dtype. No linear of the model has a bias.

    Holds `weight` [out, in] in the given dtype, multiplied in that dtype.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class BlockLinear(nn.Module):
    """x [..., in] -> x W^T [..., out], for the matrices that released checkpoints store in block FP8.

    Holds either the dequantised `weight` in the model's dtype, or, with `keep_fp8`, `weight` in e4m3 and
    `weight_scale_inv` [ceil(out/128), ceil(in/128)] as stored, dequantised at each use.
    With `numerics.linear_input_fp8` the input is rounded to FP8 first and the product is taken in float32, which is
    what an FP8 matrix product with float accumulation computes.
    """

    def __init__(self, in_features: int, out_features: int, *, numerics: Numerics, keep_fp8: bool) -> None:
        super().__init__()
        self.numerics = numerics
        self.keep_fp8 = keep_fp8
        if keep_fp8:
            grid = -(-out_features // TILE), -(-in_features // TILE)
            self.weight = weight(out_features, in_features, dtype=torch.float8_e4m3fn)
            self.weight_scale_inv = weight(*grid, dtype=torch.float32)
        else:
            self.weight = weight(out_features, in_features, dtype=numerics.dtype)

    def plain_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix [out, in] in the given dtype, by default the model's."""
        dtype = dtype or self.numerics.dtype
        if self.keep_fp8:
            return dequantize_weight(self.weight, self.weight_scale_inv, dtype=dtype)
        return self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.numerics.linear_input_fp8:
            rounded = round_groups(x, scale_ue8m0=self.numerics.linear_input_ue8m0)
            return nn.functional.linear(rounded, self.plain_weight(torch.float32)).to(x.dtype)
        return nn.functional.linear(x, self.plain_weight())


class RmsNorm(nn.Module):
    """x [..., N] -> weight * x / rms(x), statistics and weight in float32."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight(width, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class LayerNorm(nn.Module):
    """x [..., N] -> weight * (x - mean) / std + bias, statistics, weight and bias in float32."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight(width, dtype=torch.float32)
        self.bias = weight(width, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class Embedding(nn.Module):
    """ids [T] -> rows [T, N]."""

    def __init__(self, num_rows: int, width: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(num_rows, width, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)
