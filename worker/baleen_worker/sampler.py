"""Chooses tokens from logits, and states log-probabilities.

Owns the meaning of the sampling parameters. A choice depends on the request's own logits, parameters, seed and output
index, and on nothing else: neither on the rows beside it nor on how often the generator was used before.

Order of the steps: temperature; the `top_k` likeliest; of those, renormalised, the fewest likeliest that together
reach `top_p`; of those, the ones at least `min_p` times as likely as the likeliest. Equals are ordered by token id, the
lower first. Every id of the vocabulary can be chosen.

Noise. Token v of output i with a 64-bit seed s gets u = (top 53 bits of mix(key + (v + 1) * G) + 1/2) / 2^53, where
key = mix(s + (i + 1) * G), G = 0x9E3779B97F4A7C15 and mix is the finaliser of SplitMix64 (Steele, Lea and Flood 2014),
all modulo 2^64. The choice is the largest log p_v - log(-log u), the Gumbel-max form of sampling from p.

Legend: N rows, V vocabulary, k listed alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baleen_worker.staging import list_to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baleen_worker.request import SamplingParams

_G = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# Elements of float64 that are held at a time when sampling (64 MiB), for large vocabularies.
_MAX_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Which token to choose: the request's parameters and the number of the output."""

    sampling: SamplingParams
    output_index: int


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """logits [N, V] float32, finite, with one spec per row -> token ids [N] int64. The logits are not changed."""
    chosen = logits.argmax(-1)  # the first of equals
    random_rows = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0]
    size = max(1, _MAX_ELEMENTS // logits.shape[1])
    for start in range(0, len(random_rows), size):
        rows = random_rows[start : start + size]
        index = list_to_device(rows, torch.int64, logits.device)
        chosen[index] = _sample_random(logits[index], [specs[row] for row in rows])
    return chosen


def _sample_random(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    def column(values: Sequence[float]) -> Tensor:
        return list_to_device(values, torch.float64, logits.device)[:, None]

    params = [spec.sampling for spec in specs]
    scores = logits.double()
    # Differences first: with a temperature near zero the quotients would overflow.
    scores = (scores - scores.amax(-1, keepdim=True)) / column(
        [p.temperature for p in params]
    )  # [N, V], likeliest is 0
    cut = [row for row, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < logits.shape[1]]
    if cut:
        index = list_to_device(cut, torch.int64, logits.device)
        scores[index] = _cut_tail(scores[index], [params[row] for row in cut])
    # A bound on the quotient of probabilities; the likeliest itself always stays.
    scores.masked_fill_(scores < column([p.min_p for p in params]).log(), -torch.inf)
    return (scores + gumbel_noise(specs, logits.shape[1], logits.device)).argmax(-1)


def _cut_tail(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """scores [N, V] -> the same with -inf where `top_k` and `top_p` leave a token out."""
    num_ids = scores.shape[1]
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    most = [p.top_k if 0 < p.top_k < num_ids else num_ids for p in params]
    top_k = list_to_device(most, torch.int64, scores.device)
    top_p = list_to_device([p.top_p for p in params], scores.dtype, scores.device)
    rank = torch.arange(num_ids, device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    # A top_p of one keeps all, whatever the rounding of the sums.
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    return torch.empty_like(scores).scatter_(-1, ids, ordered.masked_fill_(dropped, -torch.inf))


def gumbel_noise(specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> Tensor:
    """[N, V] float64 as the module docstring defines it: a row depends on its spec's seed and output index alone."""
    keys = [_mix_int(spec.sampling.seed + (spec.output_index + 1) * _G) for spec in specs]
    places = torch.arange(1, vocab_size + 1, device=device) * _signed(_G)
    bits = _mix(list_to_device([_signed(key) for key in keys], torch.int64, device)[:, None] + places)
    u = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    # Above 1 - 2^-53 the sum rounds to one, whose logarithm is zero.
    return -(-u.clamp(max=1.0 - 2.0**-53).log()).log()


def _mix(x: Tensor) -> Tensor:
    """The finaliser on int64 tensors, whose products wrap like unsigned ones."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 of the same bits."""
    return x - (1 << 64) if x >> 63 else x


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, the float32 log-softmax of the logits as they are.

    logits [N, V], token_ids [N] -> of those tokens [N], and ids and values of the likeliest [N, num_top] each, the
    likeliest first. `num_top` is cut to V.
    """
    logprobs = logits.float().log_softmax(-1)
    top_ids = likeliest(logits, min(num_top, logits.shape[1]))
    return logprobs.gather(-1, token_ids[:, None])[:, 0], top_ids, logprobs.gather(-1, top_ids)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """Ids [N, k] of the largest logits [N, V] in descending order, the lower id first among equals."""
    if k == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(k, -1)
    # topk orders and picks equals as it likes. Order them by id, then by value, both stably …
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    # … and pick again where some equal to the last was left out.
    ambiguous = ((logits >= values[:, -1:]).sum(-1) > k).nonzero()[:, 0]
    for row in ambiguous.tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:k]
    return ids
