"""Causal attention of several requests laid end to end, one key and value per head.

Request r owns queries cu_q[r] .. cu_q[r+1] and keys cu_k[r] .. cu_k[r+1]; its queries sit at its last places, so
query i of m sees the first n - m + i + 1 of its n keys.
  out[t, h] = sum over visible s of softmax(softmax_scale * q[t, h] . k[s, h])[s] * v[s, h]

q [T, H, D], k [N, H, D], v [N, H, E] float32 or bfloat16; cu_q and cu_k lists of R + 1 offsets, m <= n for each request
-> [T, H, E] in q's dtype. Scores, softmax and sums in float32; queries in chunks, so the scores never are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels.machine import HOPPER, Needs
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

# Scores held at a time (64 MiB).
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Case:
    """`lengths`: (queries, keys) of each request."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 3
    width: int = 12
    value_width: int = 8
    dtype: torch.dtype = torch.float32


CASES = (
    Case("whole_prompt", ((9, 9),)),
    Case("after_prefix", ((3, 11),)),
    Case("ragged", ((1, 1), (5, 8), (4, 4), (1, 20))),
    Case("wide_values", ((6, 6),), value_width=24),
    Case("nothing", ()),
    Case("released", ((65, 65), (3, 130), (1, 1)), num_heads=8, width=192, value_width=128, dtype=torch.bfloat16),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random requests of the case's lengths."""
    g = torch.Generator().manual_seed(0)
    cu_q = [0, *accumulate(queries for queries, _ in case.lengths)]
    cu_k = [0, *accumulate(keys for _, keys in case.lengths)]
    return {
        "q": torch.randn(cu_q[-1], case.num_heads, case.width, generator=g).to(case.dtype),
        "k": torch.randn(cu_k[-1], case.num_heads, case.width, generator=g).to(case.dtype),
        "v": torch.randn(cu_k[-1], case.num_heads, case.value_width, generator=g).to(case.dtype),
        "cu_q": cu_q,
        "cu_k": cu_k,
        "softmax_scale": 0.3,
    }


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float
) -> Tensor:
    """The contract, query by query."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        for query in range(q_start, q_end):
            visible = slice(k_start, k_end - (q_end - query) + 1)
            scores = torch.einsum("hd,nhd->hn", q[query].float(), k[visible].float()) * softmax_scale
            out[query] = torch.einsum("hn,nhe->he", scores.softmax(-1), v[visible].float())
    return out


OP = Op("mha_dense", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float
) -> Tensor:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        queries = q[q_start:q_end].transpose(0, 1).float() * softmax_scale  # [H, m, D]
        keys = k[k_start:k_end].transpose(0, 1).float()  # [H, n, D]
        values = v[k_start:k_end].transpose(0, 1).float()  # [H, n, E]
        out[q_start:q_end] = _attend(queries, keys, values).transpose(0, 1)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (num_heads, num_queries, _), num_keys = q.shape, k.shape[1]
    past = num_keys - num_queries
    out = q.new_empty(num_heads, num_queries, v.shape[2])
    step = max(1, _CHUNK_ELEMENTS // max(1, num_heads * num_keys))
    for start in range(0, num_queries, step):
        end = min(start + step, num_queries)
        seen = past + end  # keys beyond the last query of the chunk are seen by none of it
        future = torch.arange(seen, device=q.device) > past + torch.arange(start, end, device=q.device)[:, None]
        scores = torch.bmm(q[:, start:end], k[:, :seen].transpose(1, 2)).masked_fill_(future, -torch.inf)
        out[:, start:end] = torch.bmm(scores.softmax(-1), v[:, :seen])
    return out


FA3 = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("fa3",))


def rejects_fa3(q: Tensor, v: Tensor, **_: Any) -> str | None:
    """Also of `mha_partial`."""
    if q.dtype != torch.bfloat16 or (q.shape[2], v.shape[2]) != (192, 128):
        return f"it takes bfloat16 heads of 192 and 128 channels, not {q.dtype} of {q.shape[2]} and {v.shape[2]}"
    return None


def call_fa3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    softmax_scale: float,
    causal: bool,
    with_lse: bool,
) -> Any:
    """FlashAttention-3 on requests end to end; with_lse: returns (out, lse [H, T])."""
    from fa3_fwd_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    offsets = torch.tensor([*cu_q, *cu_k], dtype=torch.int32).to(q.device, non_blocking=True)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        offsets[: len(cu_q)],
        offsets[len(cu_q) :],
        max(end - start for start, end in pairwise(cu_q)),
        max(end - start for start, end in pairwise(cu_k)),
        softmax_scale=softmax_scale,
        causal=causal,
        return_attn_probs=with_lse,
    )


@OP.backend("fa3", needs=FA3, rejects=rejects_fa3)
def _fa3(q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float) -> Tensor:
    return call_fa3(q, k, v, cu_q, cu_k, softmax_scale=softmax_scale, causal=True, with_lse=False)


def mha_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    softmax_scale: float,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(q, k, v, cu_q, cu_k, softmax_scale=softmax_scale)
