"""Attention over parts of the keys, put together: what the softmax over all of them would have given.

parts [T, P, H, C]: for every query the result over each of P parts of its keys; lse [T, P, H] float32: the natural
logarithm of the sum of the exponentials of that part's scores, infinite of either sign for a part without keys ->
[T, H, C] of the dtype of parts, sums in float32; zeros where no part has keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`empty`: how many of the last parts of every second token have no keys."""

    name: str
    num_tokens: int
    num_parts: int
    num_heads: int
    width: int = 512
    empty: int = 0
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("one_token", 1, 8, 128),
    Case("short_context", 3, 4, 64, empty=3),
    Case("nothing", 2, 2, 8, empty=2),
    Case("few_heads", 2, 2, 3, width=32),
    Case("float32", 2, 4, 4, width=64, dtype=torch.float32),
    Case("no_tokens", 0, 2, 4, width=64),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random results and sums."""
    g = torch.Generator().manual_seed(case.num_tokens)
    lse = 5 * torch.randn(case.num_tokens, case.num_parts, case.num_heads, generator=g)
    lse[::2, case.num_parts - case.empty :] = torch.inf
    parts = torch.randn(case.num_tokens, case.num_parts, case.num_heads, case.width, generator=g)
    return {"parts": parts.to(case.dtype), "lse": lse}


def reference(parts: Tensor, lse: Tensor) -> Tensor:
    """The contract in float64."""
    lse = lse.double().masked_fill(~lse.isfinite(), -torch.inf)
    weights = (lse - lse.logsumexp(1, keepdim=True)).exp().nan_to_num()
    return (weights[..., None] * parts.double()).sum(1).to(parts.dtype)


OP = Op("merge_parts", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(parts: Tensor, lse: Tensor) -> Tensor:
    weights = lse.masked_fill(~lse.isfinite(), -torch.inf).softmax(1).nan_to_num()
    return (weights[..., None] * parts.float()).sum(1).to(parts.dtype)


def _rejects_triton(parts: Tensor, lse: Tensor) -> str | None:
    if not (parts.is_contiguous() and lse.is_contiguous()):
        return "parts and sums must be contiguous"
    return "it takes a power of two of channels" if parts.shape[3] & (parts.shape[3] - 1) else None


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(parts: Tensor, lse: Tensor) -> Tensor:
    from baleen_kernels.own import merge_parts as own

    return own.merge(parts, lse)


def merge_parts(parts: Tensor, lse: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(parts, lse)
