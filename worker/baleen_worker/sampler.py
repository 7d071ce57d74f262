"""Chooses tokens from logits, and states log-probabilities.

Owns the keys of the noise, and what sampling parameters become for the op `sample`, which holds their meaning.
A choice depends on the request's own logits, parameters, seed and output index, and on nothing else: neither on the
rows beside it nor on how often the generator was used before. Every id of the vocabulary can be chosen.

Noise: output i with a 64-bit seed s has the key mix(s + (i + 1) * G), with mix and G as in `baleen_kernels.sample`.

Legend: N rows, V vocabulary, k listed alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from baleen_kernels import sample as op

from baleen_worker.staging import list_to_device, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baleen_worker.request import SamplingParams

# Elements of float64 that are held at a time when sampling with PyTorch ops (64 MiB), for large vocabularies.
_MAX_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Which token to choose: the request's parameters and the number of the output."""

    sampling: SamplingParams
    output_index: int


def sample(logits: Tensor, specs: Sequence[SampleSpec], *, choose: Callable[..., Tensor] = op.sample) -> Tensor:
    """logits [N, V] float32, finite, with one spec per row -> token ids [N] int64. The logits are not changed.

    `choose`: the op `sample`, bound to a backend.
    """
    chosen = logits.argmax(-1)  # the first of equals
    random_rows = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0]
    cut = [row for row in random_rows if cuts_tail(specs[row].sampling, logits.shape[1])]
    size = max(1, _MAX_ELEMENTS // logits.shape[1])
    for kind in (cut, sorted({*random_rows} - {*cut})):
        for start in range(0, len(kind), size):
            rows = kind[start : start + size]
            index = list_to_device(rows, torch.int64, logits.device)
            temperature, top_p, min_p, top_k, keys = columns_of(
                to_device(rules([specs[row] for row in rows]), logits.device)
            )
            ends = (top_k, top_p) if kind is cut else (None, None)
            chosen[index] = choose(logits[index], chosen[index], temperature, *ends, min_p, keys)
    return chosen


def cuts_tail(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether `top_k` or `top_p` leaves a token out."""
    return sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size


def rules(specs: Sequence[SampleSpec]) -> np.ndarray:
    """[5, N] int64 of N specs, all that the op `sample` needs in one piece: see `columns_of`."""
    table = np.empty((5, len(specs)), dtype=np.int64)
    params = [spec.sampling for spec in specs]
    table[:3].view(np.float64)[:] = [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    table[3] = [p.top_k for p in params]
    table[4] = [noise_key(spec) for spec in specs]
    return table


def columns_of(table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`rules` on a device -> temperature, top_p, min_p [N] float64, top_k, keys [N] int64, in its memory."""
    temperature, top_p, min_p = (row.view(torch.float64) for row in table[:3])
    return temperature, top_p, min_p, table[3], table[4]


def noise_key(spec: SampleSpec) -> int:
    """The key as the module docstring defines it, as an int64 of the same bits."""
    return op.signed(op.mix(spec.sampling.seed + (spec.output_index + 1) * op.G))


def gumbel_noise(specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> Tensor:
    """[N, V] float64: what is added to each token's log-probability."""
    keys = list_to_device([noise_key(spec) for spec in specs], torch.int64, device)
    return op.gumbel_noise(keys, vocab_size)


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
