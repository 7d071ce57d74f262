"""Absorbed multi-head latent attention over selected keys: one key and one value, the latent, for all heads.

For token t, head h, with S_t the entries of topk_indices[t] that are not -1:
  score[s] = softmax_scale * (q_latent[t, h] . kv_latent[s] + q_rope[t, h] . k_rope[s])
  out[t, h] = sum over S_t of softmax(score)[s] * kv_latent[s]
A token that selects nothing gets zeros. Keys that a token does not select have no influence on it, not even if they are
not finite. Causality is the caller's: it selects only visible keys.

q_latent [T, H, C], q_rope [T, H, R], float32 or bfloat16, as are the keys -> [T, H, C] in q_latent's dtype.
mla_sparse: kv_latent [n, C], k_rope [n, R]; topk_indices [T, K] integer, rows of kv_latent, -1 for none, in any place.
mla_selected: kv_latent [T, K, C], k_rope [T, K, R], each token's keys gathered; present [T, K] bool, False for none.
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
# Copying one key costs a token about as much as multiplying it for this many heads; measured on x86.
_HEADS_PER_COPY = 40
# On a CPU, tokens at a time: the fewer, the fewer keys that none of them picks are multiplied.
_HOST_CHUNK_TOKENS = 128


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
    Case("many_keys", 5, 4, 300, 8),
    Case("many_heads", 3, 64, 40, 16),
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
    (num_tokens, num_heads, latent), topk, num_keys = q_latent.shape, topk_indices.shape[1], kv_latent.shape[0]
    keys = torch.cat([kv_latent, k_rope], -1).float()  # [n, C + R]
    # Gathering copies K keys per token; a matrix product with all n keys and a mask copies none, but counts for every
    # head. The mask lets what is not finite through, gathering does not.
    most_masked = topk * (num_heads + _HEADS_PER_COPY) // num_heads if bool(keys.isfinite().all()) else -1
    width = num_keys * num_heads if num_keys <= most_masked else topk * (keys.shape[1] + num_heads)
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    if not keys.is_cuda:
        step = min(step, _HOST_CHUNK_TOKENS)
    out = torch.empty_like(q_latent)
    for start in range(0, num_tokens, step):
        chunk = slice(start, start + step)
        q = torch.cat([q_latent[chunk], q_rope[chunk]], -1).float() * softmax_scale  # [t, H, C + R]
        picks = topk_indices[chunk].long()
        # Prompts attend backwards, so early tokens pick from few keys. On a GPU, asking would cost more than it saves.
        seen = num_keys if keys.is_cuda else int(picks.max()) + 1
        if seen <= most_masked:
            out[chunk] = _attend_masked(q, keys[:seen], picks, latent)
        else:
            selected = keys[picks.clamp(min=0)]  # [t, K, C + R]
            out[chunk] = _attend(q, selected, picks < 0, latent)
    return out


def _attend(q: Tensor, selected: Tensor, absent: Tensor, latent: int) -> Tensor:
    """q [t, H, C + R] scaled, selected [t, K, C + R], absent [t, K] -> [t, H, C]. `selected` is overwritten."""
    some_absent = bool(absent.any())
    if some_absent:
        # Zeros, not whatever was gathered in their place: a weight of zero times a foreign NaN would be NaN.
        selected = selected.masked_fill_(absent[..., None], 0.0)
    scores = torch.bmm(q, selected.transpose(1, 2))  # [t, H, K]
    if some_absent:
        scores.masked_fill_(absent[:, None], -torch.inf)
    return torch.bmm(_softmax(scores, absent), selected[..., :latent])


def _attend_masked(q: Tensor, keys: Tensor, picks: Tensor, latent: int) -> Tensor:
    """q [t, H, C + R] scaled, keys [n, C + R], picks [t, K], -1 for none -> [t, H, C]."""
    num_keys = keys.shape[0]
    unpicked = torch.ones(picks.shape[0], num_keys + 1, dtype=torch.bool, device=picks.device)
    unpicked = unpicked.scatter_(1, picks.where(picks >= 0, num_keys), False)[:, :num_keys]
    scores = (q.flatten(0, 1) @ keys.T).unflatten(0, q.shape[:2]).masked_fill_(unpicked[:, None], -torch.inf)
    weights = _softmax(scores, unpicked)  # [t, H, n]
    return (weights.flatten(0, 1) @ keys[:, :latent]).unflatten(0, q.shape[:2])


def _softmax(scores: Tensor, absent: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    empty = absent.all(-1)
    if empty.any():
        weights[empty] = 0.0  # the softmax of nothing
    return weights


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


def make_selected_inputs(case: Case) -> dict[str, Any]:
    """The inputs of the same case, gathered."""
    inputs = make_inputs(case)
    picks = inputs.pop("topk_indices").long()
    for name in ("kv_latent", "k_rope"):
        inputs[name] = inputs[name][picks.clamp(min=0)]
    return {**inputs, "present": picks >= 0}


def selected_reference(
    q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor, present: Tensor, *, softmax_scale: float
) -> Tensor:
    """The contract, through that of `mla_sparse`."""
    picks = torch.arange(present.numel()).view(present.shape).where(present, -1)
    keys = kv_latent.flatten(0, 1), k_rope.flatten(0, 1)
    return reference(q_latent, q_rope, *keys, picks, softmax_scale=softmax_scale)


SELECTED_OP = Op("mla_selected", selected_reference, CASES, make_selected_inputs)


@SELECTED_OP.backend("torch")
def _selected_torch(
    q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor, present: Tensor, *, softmax_scale: float
) -> Tensor:
    (num_tokens, num_heads, latent), topk = q_latent.shape, present.shape[1]
    out = torch.empty_like(q_latent)
    step = max(1, _CHUNK_ELEMENTS // max(1, topk * (latent + k_rope.shape[2] + num_heads)))
    for start in range(0, num_tokens, step):
        chunk = slice(start, start + step)
        q = torch.cat([q_latent[chunk], q_rope[chunk]], -1).float() * softmax_scale
        selected = torch.cat([kv_latent[chunk], k_rope[chunk]], -1).float()
        out[chunk] = _attend(q, selected, ~present[chunk], latent)
    return out


def mla_selected(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_latent: Tensor,
    k_rope: Tensor,
    present: Tensor,
    *,
    softmax_scale: float,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return SELECTED_OP.pick(backend)(q_latent, q_rope, kv_latent, k_rope, present, softmax_scale=softmax_scale)
