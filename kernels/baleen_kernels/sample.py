"""Chooses a token of each row at random, as its request asks: no state, no order among rows, nothing on the host.

Order of the steps, in float64: logits, less the row's largest, over the temperature; the `top_k` likeliest; of those,
renormalised, the fewest likeliest that together reach `top_p`; of those, the ones at least `min_p` times as likely as
the likeliest. Equal logits are ordered by token id, the lower first; -0.0 equals 0.0. The likeliest token always stays.

Noise: token v of a row with key q gets u = (top 53 bits of mix(q + (v + 1) * G) + 1/2) / 2^53, at most 1 - 2^-53, where
G = 0x9E3779B97F4A7C15 and mix is the finaliser of SplitMix64, all modulo 2^64. The token is the first largest
log p_v - log(-log u), the Gumbel-max form of sampling from p.

logits [T, V] float32, -inf for what must not be chosen; greedy [T] int64: the first largest logit of each row;
temperature, top_p, min_p [T] float64; top_k, keys [T] int64 -> token_ids [T] int64. A temperature of 0 takes `greedy`.
`top_k` 0 or V and more, `top_p` 1 and more, `min_p` 0 leave nothing out; top_k None with top_p None: so in every row.
Where logits are NaN or +inf, the token is some number from 0 to V - 1 that means nothing.

Masses may be summed in any order, in fixed point of 45 bits and finer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

G = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LARGEST_U = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Case:
    """Rows take the values of each field in turn. `levels` > 0 rounds logits, which makes ties. `allowed`: how many
    tokens are not forbidden; None: all."""

    name: str
    num_rows: int
    vocab: int
    temperature: tuple[float, ...] = (1.0,)
    top_k: tuple[int, ...] | None = (0,)
    top_p: tuple[float, ...] | None = (1.0,)
    min_p: tuple[float, ...] = (0.0,)
    levels: int = 0
    allowed: int | None = None


CASES = (
    Case("mixed", 8, 500, (1.0, 0.0, 0.6, 1.5), (0, 40, 7), (1.0, 0.9), (0.0, 0.05)),
    Case("released", 3, 129_280, (0.7, 1.0, 0.0), (0, 50), (0.95, 1.0, 0.8)),
    Case("nothing_left_out", 5, 5_000, top_k=None, top_p=None),
    Case("one_likeliest", 3, 300, top_k=(1,)),
    Case("more_than_there_are", 3, 300, top_k=(300, 301, 299)),
    Case("hardly_any_mass", 3, 5_000, top_p=(1e-9, 0.01)),
    Case("nearly_all_mass", 3, 5_000, top_p=(0.999,), top_k=(0, 4_000)),
    Case("unlikely_ones", 4, 5_000, min_p=(0.5, 1.0, 0.01)),
    Case("ties", 6, 9_000, top_k=(0, 100, 2_500), top_p=(1.0, 0.5, 0.3), levels=3),
    Case("all_equal", 3, 9_000, top_k=(0, 5_000, 17), top_p=(0.5, 1.0, 0.9), levels=1),
    Case("cold", 3, 2_000, (1e-6, 0.01), (0, 20), (1.0, 0.9)),
    Case("masked", 5, 5_000, (1.0, 0.8), (0, 50, 3), (1.0, 0.9), allowed=12),
    Case("one_allowed", 3, 700, (1.0,), (0, 50), (0.9,), allowed=1),
    Case("one_word", 2, 1),
    Case("no_rows", 0, 100),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random logits with zeros of both signs, and keys of all bits."""
    g = torch.Generator().manual_seed(case.vocab)
    logits = 3 * torch.randn(case.num_rows, case.vocab, generator=g)
    logits[:, ::7] = 0.0
    logits[:, ::14] = -0.0
    if case.levels:
        logits = torch.randint(0, case.levels, logits.shape, generator=g).float()
        logits = torch.where((logits == 0) & (torch.rand(logits.shape, generator=g) < 0.5), -0.0, logits)
    if case.allowed is not None:
        order = torch.rand(logits.shape, generator=g).argsort(-1)
        logits = logits.masked_fill(order >= case.allowed, -torch.inf)

    def column(values: tuple[Any, ...] | None, dtype: torch.dtype) -> Tensor | None:
        if values is None:
            return None
        return torch.tensor([values[row % len(values)] for row in range(case.num_rows)], dtype=dtype)

    return {
        "logits": logits,
        "greedy": logits.argmax(-1),
        "temperature": column(case.temperature, torch.float64),
        "top_k": column(case.top_k, torch.int64),
        "top_p": column(case.top_p, torch.float64),
        "min_p": column(case.min_p, torch.float64),
        "keys": torch.randint(-(2**63), 2**63 - 1, (case.num_rows,), generator=g),
    }


def reference(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    """The contract, row by row and token by token."""
    chosen = greedy.clone()
    vocab = logits.shape[1]
    for row, (heat, floor, key) in enumerate(zip(temperature.tolist(), min_p.tolist(), keys.tolist(), strict=True)):
        if heat == 0:
            continue
        scores = ((logits[row].double() - logits[row].max().double()) / heat).tolist()
        order = logits[row].sort(descending=True, stable=True).indices.tolist()
        most = vocab if top_k is None or int(top_k[row]) == 0 else int(top_k[row])
        share = 1.0 if top_p is None else float(top_p[row])
        weights = [math.exp(scores[v]) for v in order[:most]]
        total, mass, best = math.fsum(weights), 0.0, (-math.inf, 0)
        for place, (v, weight) in enumerate(zip(order[:most], weights, strict=True)):
            if place and ((share < 1 and mass / total >= share) or weight == 0):
                break
            mass += weight
            if not place or floor == 0 or scores[v] >= math.log(floor):
                best = max(best, (scores[v] + _noise_of(key, v), -v))
        chosen[row] = -best[1]
    return chosen


def _noise_of(key: int, token_id: int) -> float:
    u = ((mix(key + (token_id + 1) * G) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(min(u, _LARGEST_U)))


def mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)


OP = Op("sample", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    if not logits.numel():
        return greedy.clone()
    scores = logits.double()
    # Differences first: with a temperature near zero the quotients would overflow. The likeliest is 0.
    scores = (scores - scores.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if top_k is not None and top_p is not None:
        scores = _cut_tail(scores, top_k, top_p)
    # A bound on the quotient of probabilities.
    scores.masked_fill_(scores < min_p.clamp(max=1.0).log()[:, None], -torch.inf)
    chosen = (scores + gumbel_noise(keys, logits.shape[1])).argmax(-1)
    return torch.where(temperature > 0, chosen, greedy)


def _cut_tail(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """scores [T, V] -> the same with -inf where `top_k` and `top_p` leave a token out."""
    num_ids = scores.shape[1]
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    most = torch.where(top_k > 0, top_k, num_ids)
    ordered = ordered.masked_fill(torch.arange(num_ids, device=scores.device) >= most[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    # A top_p of one keeps all, whatever the rounding of the sums.
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    dropped[:, 0] = False
    return torch.empty_like(scores).scatter_(-1, ids, ordered.masked_fill_(dropped, -torch.inf))


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """keys [T] int64 -> [T, V] float64 as the module docstring defines it."""
    places = torch.arange(1, vocab + 1, device=keys.device) * signed(G)
    bits = _mix(keys[:, None] + places)
    u = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    # Above 1 - 2^-53 the sum rounds to one, whose logarithm is zero.
    return -(-u.clamp(max=_LARGEST_U).log()).log()


def _mix(x: Tensor) -> Tensor:
    """The finaliser on int64 tensors, whose products wrap like unsigned ones."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return x - (1 << 64) if x >> 63 else x


def _rejects_gaps(logits: Tensor, **_: Any) -> str | None:
    return None if logits.stride(1) == 1 else "the logits of a row must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_gaps)
def _triton(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    from baleen_kernels.own import sample as own

    return own.choose(logits, greedy, temperature, top_k, top_p, min_p, keys)


def sample(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    keys: Tensor,
    *,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring. ValueError if only one of `top_k` and `top_p` is None."""
    if (top_k is None) != (top_p is None):
        raise ValueError("top_k and top_p are given together or not at all")
    return OP.pick(backend)(logits, greedy, temperature, top_k, top_p, min_p, keys)
