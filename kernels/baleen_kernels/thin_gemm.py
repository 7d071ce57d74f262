"""Matrix product of a few FP8 tokens with block-FP8 weights, as fast as the weights can be read.

The contract is that of `fp8_gemm`, for at most `MOST_TOKENS` tokens and N a multiple of 64. A product of few tokens has
too few tiles to keep a device busy, so channels are summed in parts, whose sums are added in one order: results do not
depend on which part was done first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_gemm, fp8_quant
from baleen_kernels.fp8_gemm import Case
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

MOST_TOKENS = 16
_MOST_PARTS = 8
# Tiles and parts of them that keep an H200 busy, by channels of a tile: one or two on each of 132 multiprocessors.
_MOST_BLOCKS = {64: 288, 128: 132}

CASES = (
    Case("one_token", 1, 512, 256),
    Case("tokens", 13, 256, 384),
    Case("most_tokens", MOST_TOKENS, 1024, 64),
    Case("partial_tile", 5, 512, 576),
    Case("uneven_parts", 3, 1408, 192),
    Case("released", 3, 7168, 2240),
    Case("many_tiles", 2, 256, 32_768),
    Case("no_tokens", 0, 256, 256),
    Case("float32", 5, 256, 192, dtype=torch.float32),
)


def cut_of(out_features: int, width: int) -> tuple[int, int]:
    """Output channels of a tile, and parts that its sums are cut into, a power of two up to 8, of at least four blocks
    of 128 channels each.
    """
    tile = 128 if out_features % 128 == 0 and out_features >= 56 * 128 else 64
    tiles, blocks, parts = out_features // tile, width // fp8_quant.GROUP, 1
    while parts < _MOST_PARTS and 2 * parts * tiles <= _MOST_BLOCKS[tile] and blocks >= 8 * parts:
        parts *= 2
    return tile, parts


OP = Op("thin_gemm", fp8_gemm.reference, CASES, fp8_gemm.make_inputs)


@OP.backend("torch")
def _torch(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return fp8_gemm.fp8_gemm(values, scales, weight, weight_scale, dtype=dtype)


def _rejects_triton(values: Tensor, weight: Tensor, **_: Any) -> str | None:
    if weight.shape[0] % 64:
        return f"it takes a multiple of 64 output channels, not {weight.shape[0]}"
    return None if values.is_contiguous() and weight.is_contiguous() else "matrices must be contiguous"


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    from baleen_kernels.own import thin_gemm as own

    tile, parts = cut_of(*weight.shape)
    return own.multiply(values, scales, weight, weight_scale, dtype=dtype, tile=tile, parts=parts)


def thin_gemm(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring. ValueError for too many tokens, or shapes that do not go together."""
    if values.shape[0] > MOST_TOKENS:
        raise ValueError(f"{values.shape[0]} tokens are more than the {MOST_TOKENS} of a thin product: use fp8_gemm")
    if values.shape[1] != weight.shape[1] or values.shape[1] % fp8_quant.GROUP:
        raise ValueError(f"activations {tuple(values.shape)} do not go with a weight {tuple(weight.shape)}")
    return OP.pick(backend)(values, scales, weight, weight_scale, dtype=dtype)
