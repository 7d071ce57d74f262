"""Chooses tokens from logits, and reports log-probabilities. Owns the sampling parameters of each slot.

A row's token depends only on its own logits, its parameters, its seed and the number of the output token, never on
who else is in the batch: the noise is a hash of (seed, output index, token id) and the choice is the largest of
log-probability plus Gumbel noise, which draws from the softmax exactly (Gumbel-max). The same three numbers give the
same noise on every device.

Order: temperature, top-k, top-p over what is left, min-p relative to the likeliest. Ties go to the lower id.

Legend: N rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baleen_worker.request import SamplingParams
from baleen_worker.step import TokenLogprobs

# Floats of logits that filters and noise may hold at a time (64 MiB): both make several copies.
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows that sample, one element a row; host arrays."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    output_index: np.ndarray


class SamplingTable:
    """Parameters by slot, written when a request takes the slot."""

    def __init__(self, max_running_requests: int) -> None:
        self._temperature = np.ones(max_running_requests, np.float32)
        self._top_p = np.ones(max_running_requests, np.float32)
        self._top_k = np.zeros(max_running_requests, np.int64)
        self._min_p = np.zeros(max_running_requests, np.float32)
        self._seed = np.zeros(max_running_requests, np.uint64)
        self._num_top_logprobs: list[int | None] = [None] * max_running_requests
        self._num_top_prompt_logprobs: list[int | None] = [None] * max_running_requests

    def set(self, slot: int, sampling: SamplingParams) -> None:
        """Replaces what the slot held."""
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        # Ids below 2^31 exist, so a larger k keeps all; the array's type holds it either way.
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._num_top_logprobs[slot] = sampling.logprobs
        self._num_top_prompt_logprobs[slot] = sampling.prompt_logprobs

    def num_top_logprobs(self, slot: int) -> int | None:
        """Alternatives to list beside each output token; None when the request wants no log-probabilities."""
        return self._num_top_logprobs[slot]

    def num_top_prompt_logprobs(self, slot: int) -> int:
        """Alternatives to list beside each prompt token."""
        return self._num_top_prompt_logprobs[slot] or 0

    def gather(self, slots: Sequence[int], output_index: Sequence[int]) -> SamplingBatch:
        """The parameters of some slots, in order."""
        at = np.asarray(slots, np.int64)
        return SamplingBatch(
            self._temperature[at],
            self._top_p[at],
            self._top_k[at],
            self._min_p[at],
            self._seed[at],
            np.asarray(output_index, np.int64),
        )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [N, V] float32, finite -> token ids [N] int64 on the same device."""
    chosen = logits.argmax(-1)  # of equal logits the first
    rows = np.flatnonzero(batch.temperature > 0)
    if not rows.size:
        return chosen
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, rows.size, step):
        some = rows[start : start + step]
        at = torch.from_numpy(some).to(logits.device)
        chosen[at] = _draw(logits[at], batch, some)
    return chosen


def _draw(logits: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
    device = logits.device

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows])[:, None].to(device)

    # A temperature near zero must not overflow: shifting by the maximum first keeps the largest at 0.
    scaled = (logits - logits.amax(-1, keepdim=True)) / column(batch.temperature)
    if (batch.top_k[rows] > 0).any() or (batch.top_p[rows] < 1).any():
        scaled = _keep_top(scaled, column(batch.top_k), column(batch.top_p))
    if (batch.min_p[rows] > 0).any():
        # The likeliest has scaled logit 0, so the probability ratio to it is exp(scaled).
        scaled = scaled.masked_fill(scaled.exp() < column(batch.min_p), -torch.inf)
    seeds = torch.from_numpy(batch.seed[rows].view(np.int64)).to(device)
    noise = gumbel_noise(seeds, torch.from_numpy(batch.output_index[rows]).to(device), logits.shape[1])
    return (scaled.double() + noise).argmax(-1)


def _keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets to -inf what top-k, and then top-p of the remaining distribution, leave out; the first always stays."""
    num_tokens = scaled.shape[1]
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(num_tokens, device=scaled.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probability = ordered.softmax(-1)
    # A token stays while those before it have not reached the share.
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1), -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, ids, ordered)


# --- noise ------------------------------------------------------------------------------------------------------------


def _as_signed(value: int) -> int:
    """The 64-bit pattern as torch's int64 writes it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# The increments and multipliers of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
_GAMMA = _as_signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _as_signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _as_signed(0x94D049BB133111EB)


def gumbel_noise(seeds: Tensor, output_index: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [N, V] float64, a function of (seed, output index, token id) alone.

    seeds [N] int64 (the bits of an unsigned 64-bit seed), output_index [N] int64. Two splitmix64 rounds: one makes a
    key of seed and index, one a 64-bit word of key and token id; its upper 53 bits are the uniform number.
    """
    key = _mix(seeds + _GAMMA * (output_index + 1))
    token_ids = torch.arange(1, vocab_size + 1, device=seeds.device)
    words = _mix(key[:, None] + _GAMMA * token_ids)
    uniform = (_shift_right(words, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability of one given token per row, and of the `num_top[i]` likeliest.

    logits [N, V] float32 before any sampling change, token_ids [N] -> N records of one token each.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])[:, 0].tolist()
    most = min(max(num_top, default=0), logits.shape[1])
    top_ids, top_values = _likeliest(logprobs, most)
    return [
        TokenLogprobs([token_id], [own[row]], [top_ids[row][:count]], [top_values[row][:count]])
        for row, (token_id, count) in enumerate(zip(token_ids.tolist(), num_top, strict=True))
    ]


def _likeliest(logprobs: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` largest of each row, largest first, lower id first among equals."""
    if count == 0:
        return [[] for _ in range(len(logprobs))], [[] for _ in range(len(logprobs))]
    smallest = logprobs.topk(count, dim=-1).values[:, -1]
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for row, floor in zip(logprobs, smallest, strict=True):
        candidates = (row >= floor).nonzero()[:, 0]  # ascending ids, more than `count` only where some are equal
        ordered, order = row[candidates].sort(descending=True, stable=True)
        ids.append(candidates[order[:count]].tolist())
        values.append(ordered[:count].tolist())
    return ids, values
