"""Queries of multi-head latent attention, made ready for either form of it.

Legend: T tokens, H heads, N and R query width of a head without and with rotary part, C latent width.

rotate_queries (the expanded form): the last R channels of every head are rotated, interleaved pairs, in place.
  q [T, H, N + R], bfloat16 or float32, changed in place.
absorb_queries (the absorbed form): out[t, h] = (q[t, h, :N] . up_k[h] | rotated q[t, h, N:]); q is left alone.
  q as above, up_k [H, N, C] of its dtype -> [T, H, C + R] of that dtype.
Both: cos_sin [P, R] float32, cosines then sines of each position; positions [T] int64. Heads of a token are adjacent;
tokens may lie at any distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import rope
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_heads: int
    nope: int = 128
    rope: int = 64
    latent: int = 512
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("one_token", 1, 128),
    Case("released", 5, 16),
    Case("few_heads", 7, 3, nope=24, rope=16, latent=32),
    Case("float32", 3, 4, nope=32, rope=8, latent=64, dtype=torch.float32),
    Case("no_tokens", 0, 4),
)


def make_rotate_inputs(case: Case) -> dict[str, Any]:
    """Random queries with columns of others beyond them."""
    g = torch.Generator().manual_seed(case.num_tokens)
    positions = 300
    angle = 10 * torch.randn(positions, case.rope // 2, generator=g)
    width = case.num_heads * (case.nope + case.rope)
    q = torch.randn(case.num_tokens, width + 64, generator=g).to(case.dtype)[:, :width]
    return {
        "q": q.unflatten(1, (case.num_heads, -1)),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], -1),
        "positions": torch.randint(0, positions, (case.num_tokens,), generator=g),
    }


def rotate_reference(q: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """The contract, through that of `rope`."""
    cos, sin = cos_sin[positions].chunk(2, -1)
    tail = q[..., q.shape[2] - cos_sin.shape[1] :]
    tail.copy_(rope.reference(tail, cos, sin, rope_interleaved=True))


ROTATE_OP = Op("rotate_queries", rotate_reference, CASES, make_rotate_inputs)


@ROTATE_OP.backend("torch")
def _rotate_torch(q: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    cos, sin = cos_sin[positions].chunk(2, -1)
    tail = q[..., q.shape[2] - cos_sin.shape[1] :]
    tail.copy_(rope.rope(tail, cos, sin, rope_interleaved=True))


def _rejects_triton(q: Tensor, cos_sin: Tensor, **_: Any) -> str | None:
    if cos_sin.shape[1] & (cos_sin.shape[1] - 1):
        return f"it rotates a power of two of channels, not {cos_sin.shape[1]}"
    return None if q.stride()[1:] == (q.shape[2], 1) else "the heads of a token must lie next to each other"


@ROTATE_OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _rotate_triton(q: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    from baleen_kernels.own import rotate

    rotate.rotate_tail(q, cos_sin, positions, q)


def rotate_queries(q: Tensor, cos_sin: Tensor, positions: Tensor, *, backend: str = "torch") -> None:
    """See the module docstring."""
    ROTATE_OP.pick(backend)(q, cos_sin, positions)


def make_absorb_inputs(case: Case) -> dict[str, Any]:
    """The same queries, and a random projection."""
    g = torch.Generator().manual_seed(1)
    up_k = torch.randn(case.num_heads, case.nope, case.latent, generator=g) * case.nope**-0.5
    return {**make_rotate_inputs(case), "up_k": up_k.to(case.dtype)}


def absorb_reference(q: Tensor, cos_sin: Tensor, positions: Tensor, up_k: Tensor) -> Tensor:
    """The contract, part by part."""
    nope = up_k.shape[1]
    latent = torch.einsum("thn,hnc->thc", q[..., :nope].double(), up_k.double()).to(q.dtype)
    cos, sin = cos_sin[positions].chunk(2, -1)
    return torch.cat([latent, rope.reference(q[..., nope:], cos, sin, rope_interleaved=True)], -1)


ABSORB_OP = Op("absorb_queries", absorb_reference, CASES, make_absorb_inputs)


@ABSORB_OP.backend("torch")
def _absorb_torch(q: Tensor, cos_sin: Tensor, positions: Tensor, up_k: Tensor) -> Tensor:
    nope = up_k.shape[1]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), up_k).transpose(0, 1)
    cos, sin = cos_sin[positions].chunk(2, -1)
    return torch.cat([latent, rope.rope(q[..., nope:], cos, sin, rope_interleaved=True)], -1)


def _rejects_absorb(q: Tensor, cos_sin: Tensor, up_k: Tensor, **_: Any) -> str | None:
    del up_k
    return _rejects_triton(q, cos_sin)


@ABSORB_OP.backend("triton", needs=TRITON, rejects=_rejects_absorb)
def _absorb_triton(q: Tensor, cos_sin: Tensor, positions: Tensor, up_k: Tensor) -> Tensor:
    from baleen_kernels.own import absorb, rotate

    num_heads, nope, latent = up_k.shape
    if absorb.takes(q.shape[0], nope, latent):
        return absorb.absorb(q, cos_sin, positions, up_k)
    out = torch.empty(q.shape[0], num_heads, latent + cos_sin.shape[1], dtype=q.dtype, device=q.device)
    if q.shape[0]:
        # One matrix product a head, written where it belongs; the rotation fills what is left of each row.
        torch.bmm(q[..., :nope].transpose(0, 1), up_k, out=out[..., :latent].transpose(0, 1))
        rotate.rotate_tail(q, cos_sin, positions, out)
    return out


def absorb_queries(q: Tensor, cos_sin: Tensor, positions: Tensor, up_k: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return ABSORB_OP.pick(backend)(q, cos_sin, positions, up_k)
