"""Absorbed multi-head latent attention over selected keys: one key and one value, the latent, for all heads.

For token t, head h, with S_t the entries of topk_indices[t] that are not -1:
  score[s] = softmax_scale * (q_latent[t, h] . kv_latent[s] + q_rope[t, h] . k_rope[s])
  out[t, h] = sum over S_t of softmax(score)[s] * kv_latent[s]
A token that selects nothing gets zeros. Keys that a token does not select have no influence on it, not even if they are
not finite. Causality is the caller's: it selects only visible keys.

q_latent [T, H, C], q_rope [T, H, R], kv_latent [n, C], k_rope [n, R], float32 or bfloat16;
topk_indices [T, K] integer, rows of kv_latent, -1 where there is none, in any place -> [T, H, C] in q_latent's dtype.
Scores, softmax and sums in float32. Tokens go through in chunks, so memory does not grow with T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op

# Floats of gathered keys and scores held at a time (64 MiB).
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Case:
    """`poison`: key 0 is NaN, and selected by the first token only."""

    name: str
    num_tokens: int
    num_heads: int
    num_keys: int
    topk: int
    latent: int = 32
    rope: int = 8
    padding: str = "some"
    poison: bool = False


CASES = (
    Case("full", 6, 4, 40, 16, padding="none"),
    Case("padded", 6, 4, 40, 16),
    Case("one_key", 3, 2, 1, 1, padding="none"),
    Case("not_finite_elsewhere", 6, 4, 40, 16, padding="some", poison=True),
    Case("all_padding", 3, 2, 5, 4, padding="all"),
    Case("no_tokens", 0, 2, 5, 4),
    Case("one_head", 5, 1, 9, 4),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random queries and keys; picks without repetition, some replaced by -1 in any column."""
    g = torch.Generator().manual_seed(0)
    picks = torch.rand(case.num_tokens, case.num_keys, generator=g).argsort(-1)[:, : case.topk].int()
    if case.padding != "none":
        threshold = 2.0 if case.padding == "all" else 0.3
        picks = picks.masked_fill(torch.rand(picks.shape, generator=g) < threshold, -1)
    kv_latent = torch.randn(case.num_keys, case.latent, generator=g)
    if case.poison:
        kv_latent[0] = torch.nan
        picks[1:].masked_fill_(picks[1:] == 0, -1)
        picks[0, 0] = 0
    return {
        "q_latent": torch.randn(case.num_tokens, case.num_heads, case.latent, generator=g),
        "q_rope": torch.randn(case.num_tokens, case.num_heads, case.rope, generator=g),
        "kv_latent": kv_latent,
        "k_rope": torch.randn(case.num_keys, case.rope, generator=g),
        "topk_indices": picks,
        "softmax_scale": 0.3,
    }


def reference(
    q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor, topk_indices: Tensor, *, softmax_scale: float
) -> Tensor:
    """The contract, token by token."""
    out = torch.zeros_like(q_latent)
    for token, picks in enumerate(topk_indices.tolist()):
        chosen = [pick for pick in picks if pick >= 0]
        if chosen:
            latent, rope = kv_latent[chosen].float(), k_rope[chosen].float()
            scores = q_latent[token].float() @ latent.T + q_rope[token].float() @ rope.T
            out[token] = (scores * softmax_scale).softmax(-1) @ latent
    return out


OP = Op("mla_sparse", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(
    q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor, topk_indices: Tensor, *, softmax_scale: float
) -> Tensor:
    (num_tokens, num_heads, latent), topk = q_latent.shape, topk_indices.shape[1]
    keys = torch.cat([kv_latent, k_rope], -1).float()  # [n, C + R]
    out = torch.empty_like(q_latent)
    step = max(1, _CHUNK_ELEMENTS // max(1, topk * (keys.shape[1] + num_heads)))
    for start in range(0, num_tokens, step):
        chunk = slice(start, start + step)
        q = torch.cat([q_latent[chunk], q_rope[chunk]], -1).float() * softmax_scale  # [t, H, C + R]
        out[chunk] = _attend(q, keys, topk_indices[chunk], latent)
    return out


def _attend(q: Tensor, keys: Tensor, topk_indices: Tensor, latent: int) -> Tensor:
    absent = topk_indices < 0  # [t, K]
    # Absent keys become zeros, not whatever row 0 holds: a weight of zero times a foreign NaN would be NaN.
    selected = keys[topk_indices.clamp(min=0).long()].masked_fill_(absent[..., None], 0.0)  # [t, K, C + R]
    scores = torch.bmm(q, selected.transpose(1, 2)).masked_fill_(absent[:, None], -torch.inf)  # [t, H, K]
    weights = scores.softmax(-1)
    empty = absent.all(-1)
    if empty.any():
        weights[empty] = 0.0  # the softmax of nothing
    return torch.bmm(weights, selected[..., :latent])  # [t, H, C]


def mla_sparse(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_latent: Tensor,
    k_rope: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(q_latent, q_rope, kv_latent, k_rope, topk_indices, softmax_scale=softmax_scale)
