"""Attention over a part of the keys, in a form that other parts can be merged with.

Request r owns queries cu_q[r] .. cu_q[r+1] and keys cu_k[r] .. cu_k[r+1]. With `causal`, its queries sit at the last
places of its keys, as in `mha_dense`; without, every query sees every key of its request.
  score[t, s, h] = softmax_scale * q[t, h] . k[s, h]
  out[t, h] = sum over seen s of softmax(score)[s] * v[s, h];  lse[t, h] = log(sum over seen s of exp(score))
Nothing seen: zeros and -inf.

q [T, H, D], k [N, H, D], v [N, H, E] float32 or bfloat16; cu_q, cu_k lists of R + 1 offsets
-> out [T, H, E] in q's dtype, lse [T, H] float32, natural logarithm. Scores, softmax and sums in float32.

merge_partials: two results over disjoint keys -> the result over both. Exact but for rounding, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import mha_dense
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

# Scores held at a time (64 MiB).
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Case:
    """Requests as in `mha_dense`."""

    requests: mha_dense.Case
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.requests.name}{'' if self.causal else '_all_seen'}"


CASES = tuple(Case(requests, causal) for requests in mha_dense.CASES for causal in (True, False))


def make_inputs(case: Case) -> dict[str, Any]:
    """Those of `mha_dense`."""
    return {**mha_dense.make_inputs(case.requests), "causal": case.causal}


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The contract, query by query."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf)
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        for query in range(q_start, q_end):
            seen = slice(k_start, k_end - (q_end - query) + 1 if causal else k_end)
            scores = torch.einsum("hd,nhd->hn", q[query].float(), k[seen].float()) * softmax_scale
            if scores.shape[1]:
                out[query] = torch.einsum("hn,nhe->he", scores.softmax(-1), v[seen].float())
                lse[query] = scores.logsumexp(-1)
    return out, lse


OP = Op("mha_partial", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        keys, values = (x[k_start:k_end].transpose(0, 1).float() for x in (k, v))  # [H, n, D], [H, n, E]
        past = (k_end - k_start) - (q_end - q_start)
        step = max(1, _CHUNK_ELEMENTS // max(1, keys.shape[0] * keys.shape[1]))
        for start in range(q_start, q_end, step) if k_end > k_start else ():
            end = min(start + step, q_end)
            scores = (q[start:end].transpose(0, 1).float() * softmax_scale) @ keys.transpose(1, 2)  # [H, m, n]
            if causal:
                last_seen = past + torch.arange(start - q_start, end - q_start, device=q.device)[:, None]
                scores.masked_fill_(torch.arange(keys.shape[1], device=q.device) > last_seen, -torch.inf)
            lse[start:end] = scores.logsumexp(-1).T
            out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out, lse


@OP.backend("fa3", needs=mha_dense.FA3, rejects=mha_dense.rejects_fa3)
def _fa3(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Sequence[int], cu_k: Sequence[int], *, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = mha_dense.call_fa3(q, k, v, cu_q, cu_k, softmax_scale=softmax_scale, causal=causal, with_lse=True)
    return out, lse.T  # [H, T] as the library has it


def mha_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    softmax_scale: float,
    causal: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(q, k, v, cu_q, cu_k, softmax_scale=softmax_scale, causal=causal)


def merge_partials(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """See the module docstring. out, other [T, H, E]; lse, other_lse [T, H] -> the same shapes."""
    total = torch.logaddexp(lse, other_lse)
    # Of nothing at all there is nothing to share out.
    shares = ((part - total).exp().nan_to_num(nan=0.0)[..., None] for part in (lse, other_lse))
    merged = sum(share * part.float() for share, part in zip(shares, (out, other), strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(out.dtype), total
