"""Everything between the indexer's projections and its scores, in one step.

For each token: the query heads and the key are rotated (first R channels, half-split pairs), the key after a LayerNorm
with bias; both go through the Hadamard transform and are rounded to FP8; the key is stored in its page, the query's
scale is folded into the head weights:
  weights[t, j] = head_weights[t, j] * J^-1/2 * D^-1/2 * scale of head j.
After rotation and after the transform numbers are rounded to the inputs' dtype, as separate ops would.

q [T, J, D] and k [T, D], bfloat16 or float32, rows at any distance; head_weights [T, J] float32; norm_weight, norm_bias
[D] float32; cos_sin [P, R] float32, cosines then sines of each position; positions [T] int64; slots [T] int64; pages
[N, 64 * (D + 4)] uint8 as in `index_key_pack`, changed in place -> q_values [T, J, D] float8_e4m3fn, weights [T, J]
float32. D is 128. Scales of keys and queries are powers of two with `scale_ue8m0`. J is 0 where keys are to be stored
and nothing is to be scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, hadamard, index_key_pack, layer_norm, rope
from baleen_kernels.machine import HOPPER, TRITON, Needs
from baleen_kernels.registry import Op

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_heads: int
    dtype: torch.dtype = torch.bfloat16
    width: int = 128
    rope: int = 64
    scale_ue8m0: bool = True


CASES = (
    Case("one_token", 1, 64),
    Case("released", 5, 64),
    Case("many_tokens", 37, 16),
    Case("plain_scale", 3, 32, scale_ue8m0=False),
    Case("float32", 3, 16, dtype=torch.float32),
    Case("keys_alone", 5, 0),
    Case("no_tokens", 0, 16),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random projections; slots without order; pages full of old bytes."""
    g = torch.Generator().manual_seed(case.num_tokens)
    tokens, positions = case.num_tokens, 300
    angle = 10 * torch.randn(positions, case.rope // 2, generator=g)
    num_pages = tokens // index_key_pack.PAGE_SIZE + 2
    shape = num_pages, index_key_pack.index_page_bytes(case.width)
    return {
        "q": torch.randn(tokens, case.num_heads, case.width, generator=g).to(case.dtype),
        "k": (3 * torch.randn(tokens, case.width, generator=g) + 1).to(case.dtype),
        "head_weights": torch.randn(tokens, case.num_heads, generator=g),
        "norm_weight": 1 + 0.2 * torch.randn(case.width, generator=g),
        "norm_bias": 0.2 * torch.randn(case.width, generator=g),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], -1),
        "positions": torch.randint(0, positions, (tokens,), generator=g),
        "slots": torch.randperm(num_pages * index_key_pack.PAGE_SIZE, generator=g)[:tokens],
        "pages": torch.randint(0, 256, shape, generator=g, dtype=torch.uint8),
        "scale_ue8m0": case.scale_ue8m0,
    }


def reference(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """The contract, through those of its parts."""
    cos, sin = cos_sin[positions].chunk(2, -1)
    normed = layer_norm.reference(k, norm_weight, norm_bias, eps=NORM_EPS)[:, None]
    rotated = (_rotate(x, cos, sin, rope.reference) for x in (q, normed))
    q, normed = (hadamard.hadamard(x) for x in rotated)  # checked on its own, and its reference takes seconds
    values, scales = fp8_quant.reference(q, scale_ue8m0=scale_ue8m0)
    index_key_pack.reference(pages, slots, normed[:, 0].float(), scale_ue8m0=scale_ue8m0)
    return values, head_weights * scales[..., 0] * (max(q.shape[1], 1) * q.shape[2]) ** -0.5


OP = Op("indexer_prep", reference, CASES, make_inputs, byte_flips=0.02)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotate: Any) -> Tensor:
    width = 2 * cos.shape[1]
    return torch.cat([rotate(x[..., :width], cos, sin, rope_interleaved=False), x[..., width:]], -1)


@OP.backend("torch")
def _torch(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].chunk(2, -1)
    normed = layer_norm.layer_norm(k, norm_weight, norm_bias, eps=NORM_EPS)[:, None]
    q, normed = (hadamard.hadamard(_rotate(x, cos, sin, rope.rope)) for x in (q, normed))
    values, scales = fp8_quant.quantize_groups(q, scale_ue8m0=scale_ue8m0)
    index_key_pack.write_index_keys(pages, slots, normed[:, 0], scale_ue8m0=scale_ue8m0)
    return values, head_weights * scales[..., 0] * (max(q.shape[1], 1) * q.shape[2]) ** -0.5


def _rejects_triton(q: Tensor, k: Tensor, **_: Any) -> str | None:
    if q.shape[2] != fp8_quant.GROUP or q.shape[1] % 16:
        return f"it takes a multiple of 16 heads of {fp8_quant.GROUP} channels, not {tuple(q.shape[1:])}"
    return None if q.stride(2) == k.stride(1) == 1 else "the channels of a head must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import indexer_prep as own

    inputs = q, k, head_weights, norm_weight, norm_bias, cos_sin, positions, slots, pages
    return own.prepare(*inputs, eps=NORM_EPS, scale_ue8m0=scale_ue8m0)


def _rejects_cuda(q: Tensor, k: Tensor, **_: Any) -> str | None:
    if q.dtype != torch.bfloat16:
        return f"it takes bfloat16 projections, not {q.dtype}"
    if q.shape[2] != fp8_quant.GROUP or q.shape[1] % 8:
        return f"it takes a multiple of 8 heads of {fp8_quant.GROUP} channels, not {tuple(q.shape[1:])}"
    if q.stride(2) != 1 or k.stride(1) != 1 or q.stride(0) % 8 or k.stride(0) % 8:
        return "the channels of a head must lie next to each other, from multiples of 16 bytes"
    return None


@OP.backend("cuda", needs=Needs(archs=HOPPER, arch_note="a Hopper GPU", tools=("nvcc",)), rejects=_rejects_cuda)
def _cuda(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import indexer_kernel as own

    inputs = q, k, head_weights, norm_weight, norm_bias, cos_sin, positions, slots, pages
    return own.prepare(*inputs, eps=NORM_EPS, scale_ue8m0=scale_ue8m0)


def indexer_prep(
    q: Tensor,
    k: Tensor,
    head_weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    scale_ue8m0: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(
        q, k, head_weights, norm_weight, norm_bias, cos_sin, positions, slots, pages, scale_ue8m0=scale_ue8m0
    )
