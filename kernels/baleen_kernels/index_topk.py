"""Selection of the keys a query may attend to: the k largest index scores among the visible keys.

Row t sees positions 0 .. lengths[t] - 1; whatever `scores` holds beyond is ignored, so the causal mask is applied
before the choice. A row that sees at most k keys takes them all.

Tie rule: among equal scores the **lower position wins**, and -0.0 equals 0.0. The relu in the index score makes long
plateaus of exact zeros, so ties are common, and an undefined order would make a prompt computed in chunks differ from
the same prompt computed at once.

NaN ranks above every number: what is broken is selected, and shows in what attention makes of it.

scores [T, n] float32, lengths [T] int64 with 0 <= lengths <= n
-> positions [T, k] int32, padded with -1 at the end. Only the set is promised; the torch backend returns it ascending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op

# Rows are handled a piece at a time so that the boolean masks and ranks stay small beside the scores.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Case:
    """`levels` > 0 rounds scores to that many distinct values, which makes ties; `lengths` None means causal."""

    name: str
    num_tokens: int
    num_keys: int
    topk: int
    levels: int = 0
    lengths: tuple[int, ...] | None = None
    values: str = "normal"


CASES = (
    Case("causal", 40, 40, 8),
    Case("long", 6, 700, 64, lengths=(1, 63, 64, 65, 699, 700)),
    Case("ties", 40, 40, 8, levels=3),
    Case("one_plateau", 12, 50, 16, levels=1, lengths=(0, 1, 15, 16, 17, 30, 49, 50, 50, 50, 50, 50)),
    Case("signed_zeros", 30, 64, 16, values="signed_zeros", lengths=(64,) * 30),
    Case("minus_infinity", 4, 32, 8, values="minus_infinity", lengths=(32,) * 4),
    Case("k_above_n", 5, 5, 9),
    Case("k_equals_n", 5, 5, 5),
    Case("sees_nothing", 2, 4, 2, lengths=(0, 0)),
    Case("no_tokens", 0, 4, 2, lengths=()),
    Case("garbage_beyond", 8, 20, 4, values="garbage_beyond"),
    Case("not_a_number", 8, 20, 4, values="not_a_number", lengths=(3, 4, 5, 12, 20, 20, 20, 20)),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Scores of the case's kind."""
    g = torch.Generator().manual_seed(len(case.name))
    scores = torch.randn(case.num_tokens, case.num_keys, generator=g)
    if case.levels:
        scores = torch.randint(0, case.levels, scores.shape, generator=g).float()
    lengths = torch.tensor(range(1, case.num_tokens + 1) if case.lengths is None else case.lengths, dtype=torch.int64)
    if case.values == "signed_zeros":
        zeros = torch.where(torch.rand(scores.shape, generator=g) < 0.5, -0.0, 0.0)
        scores = torch.where(torch.rand(scores.shape, generator=g) < 0.8, zeros, scores)
    elif case.values == "minus_infinity":
        scores[:, 3:] = -torch.inf
    elif case.values == "not_a_number":
        scores[torch.rand(scores.shape, generator=g) < 0.1] = torch.nan
        scores[-1] = torch.nan
    elif case.values == "garbage_beyond":
        beyond = torch.arange(case.num_keys) >= lengths[:, None]
        scores[beyond] = torch.inf
        scores[0, case.num_keys - 1] = torch.nan
    return {"scores": scores, "lengths": lengths, "topk": case.topk}


def reference(scores: Tensor, lengths: Tensor, *, topk: int) -> Tensor:
    """The contract: a stable descending sort of each row's visible part."""
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        visible = scores[row, :length].nan_to_num(nan=torch.inf, neginf=-torch.inf).tolist()
        order = sorted(range(length), key=lambda position, visible=visible: (-visible[position], position))
        picks = sorted(order[:topk])
        out[row, : len(picks)] = torch.tensor(picks, dtype=torch.int32)
    return out


OP = Op("index_topk", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(scores: Tensor, lengths: Tensor, *, topk: int) -> Tensor:
    num_tokens, num_keys = scores.shape
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32, device=scores.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, num_keys))
    for start in range(0, num_tokens, rows):
        chunk = slice(start, start + rows)
        _select(scores[chunk], lengths[chunk], out[chunk])
    return out


def _select(scores: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Fills out [T, k] for one chunk of rows."""
    num_keys, topk = scores.shape[1], out.shape[1]
    visible = torch.arange(num_keys, device=scores.device) < lengths[:, None]  # [T, n]
    if num_keys <= topk:
        picked = visible
    else:
        masked = scores.masked_fill(~visible, -torch.inf)
        # The k-th largest value settles everything but ties: all above it are in, and of those equal to it as many
        # as there is room for, lowest positions first.
        boundary = _kth_largest(masked, topk)
        if boundary.isnan().any():
            masked = masked.nan_to_num(nan=torch.inf, neginf=-torch.inf)
            boundary = _kth_largest(masked, topk)
        picked = (masked >= boundary) & visible
        crowded = (picked.sum(-1) > topk).nonzero()[:, 0]
        if crowded.numel():
            picked[crowded] = _break_ties(masked[crowded], boundary[crowded], visible[crowded], topk)
        picked = torch.where(lengths[:, None] <= topk, visible, picked)
    row, position = picked.nonzero(as_tuple=True)  # row-major, so positions of a row come out ascending
    counts = picked.sum(-1)
    first = counts.cumsum(0) - counts
    out[row, torch.arange(row.numel(), device=scores.device) - first[row]] = position.int()


def _kth_largest(scores: Tensor, topk: int) -> Tensor:
    """[T, 1]; NaN where one is among the k largest."""
    return scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _break_ties(masked: Tensor, boundary: Tensor, visible: Tensor, topk: int) -> Tensor:
    above = masked > boundary
    equal = (masked == boundary) & visible
    room = topk - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def index_topk(scores: Tensor, lengths: Tensor, *, topk: int, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(scores, lengths, topk=topk)
