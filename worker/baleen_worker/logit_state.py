"""What sampling remembers of each running request, on the device: its tokens' counts and its reasoning.

Owns the changes to logits that a request may ask for, and the tables they read. Nothing here waits for the device or
needs a token on the host (plugins apart, whose requests are stepped one token at a time), so a step may be launched
while the one before it still runs.

A slot's memory starts with its admission and follows each sampled token when that token is fed. It notes how many
outputs it has seen, so a row that is computed again leaves it unchanged.

Legend: N rows, V vocabulary, R places in the tables of counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from baleen_kernels.mask_logits import mask_logits

from baleen_worker.staging import list_to_device, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baleen_worker.request import SamplingParams, ThinkingBudget
    from baleen_worker.step import Admission, PlannedRow

_FIRST_PLACES = 8


@dataclass(slots=True)
class SlotState:
    """One request's part. `place`: row in the tables of counts, -1 for none. `num_seen`: outputs that are counted in.

    `bias` are token ids and what is added to their logits; `stop_ids` what min_tokens forbids. `token_ids` are all
    tokens so far, kept on the host for plugins alone.
    """

    sampling: SamplingParams
    num_seen: int = 0
    num_prompt: int = 0
    place: int = -1
    bias: tuple[Tensor, Tensor] | None = None
    stop_ids: Tensor | None = None
    token_ids: list[int] = field(default_factory=list[int])


class LogitState:
    """The memory of all slots, and what it does to their logits."""

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, *, mask: Callable[..., None] = mask_logits
    ) -> None:
        """`mask`: the op `mask_logits`, bound to a backend."""
        self._mask = mask
        self._forbidden = torch.full((), -torch.inf, device=device)  # a number from the host would be waited for
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, SlotState] = {}
        self._free_places: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [R, V] of the output
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [R, V]
        self._thinking = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)  # is open, tokens used

    def admit(self, admission: Admission) -> None:
        """A slot begins anew, with the tokens it already has."""
        former = self._slots.get(admission.slot)
        if former is not None and former.place >= 0:
            self._free_places.append(former.place)
        sampling = admission.sampling
        state = self._slots[admission.slot] = SlotState(sampling, num_prompt=admission.num_prompt)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            state.bias = self._tensor(ids), list_to_device(values, torch.float32, self._device)
        if sampling.min_tokens > 0 and sampling.stop_token_ids:
            state.stop_ids = self._tensor(sampling.stop_token_ids)
        if not sampling.needs_history:
            return
        output_ids = admission.token_ids[admission.num_prompt :]
        state.num_seen = len(output_ids)
        if sampling.penalizes:
            state.place = self._take_place()
            ids = self._tensor(output_ids)
            self._counts[state.place].zero_().index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            prompt_ids = self._tensor(admission.token_ids[: admission.num_prompt])
            self._in_prompt[state.place].fill_(value=False).index_fill_(0, prompt_ids, value=True)
        if sampling.thinking is not None:
            self._thinking[admission.slot] = self._tensor(_reasoning_so_far(sampling.thinking, output_ids))
        if sampling.logit_processors:
            state.token_ids = list(admission.token_ids)

    def sampling_of(self, slot: int) -> SamplingParams:
        """The parameters of the request that has the slot."""
        return self._slots[slot].sampling

    def of(self, slot: int) -> SlotState:
        """The memory of one slot."""
        return self._slots[slot]

    def follow(self, rows: Sequence[PlannedRow], starts: Sequence[int], input_ids: Tensor) -> None:
        """Takes in the tokens that rows which sample are fed; row i's begin at `starts[i]` of `input_ids` [T]."""
        fed: list[tuple[int, int]] = []  # slot, place among the tokens
        for index, row in enumerate(rows):
            state = self._slots[row.slot]
            if not row.sample or not state.sampling.needs_history:
                continue
            num_new = row.output_index - state.num_seen
            end = starts[index + 1]
            assert 0 <= num_new <= end - starts[index], f"slot {row.slot} lost count of its outputs"
            fed += [(row.slot, place) for place in range(end - num_new, end)]
            if state.sampling.logit_processors:
                state.token_ids[row.start :] = row.token_ids
            state.num_seen = row.output_index
        counted = [(state.place, place) for slot, place in fed if (state := self._slots[slot]).place >= 0]
        if counted:
            places, fed_at = self._tensor(counted).unbind(-1)
            one = torch.ones((), dtype=torch.int32, device=self._device)
            self._counts.index_put_((places, input_ids[fed_at]), one, accumulate=True)
        reasoning = [(slot, place) for slot, place in fed if self._slots[slot].sampling.thinking is not None]
        while reasoning:  # once, unless a slot was fed several tokens
            turn = dict(reversed(reasoning))  # the first of each slot
            self._think(list(turn), input_ids[self._tensor(list(turn.values()))])
            reasoning = [(slot, place) for slot, place in reasoning if turn[slot] != place]

    def change(self, logits: Tensor, rows: Sequence[PlannedRow]) -> Tensor:
        """logits [N, V] of those rows -> what to choose from: penalties, then bias; plugins and masks come later.

        Returns the same tensor when no row asks for a change; a row that asks for none keeps its exact logits.
        """
        states = [self._slots[row.slot] for row in rows]
        penalized = [index for index, state in enumerate(states) if state.place >= 0]
        biased = [index for index, state in enumerate(states) if state.bias is not None]
        if not penalized and not biased:
            return logits
        logits = logits.clone()
        if penalized:
            index = self._tensor(penalized)
            logits[index] = self._penalize(logits[index], [states[row] for row in penalized])
        if biased:
            biases = [bias for state in states if (bias := state.bias) is not None]
            at = self._repeated(biased, [ids for ids, _ in biases])
            logits[at, torch.cat([ids for ids, _ in biases])] += torch.cat([values for _, values in biases])
        return logits

    def forbid(self, logits: Tensor, rows: Sequence[PlannedRow]) -> Tensor:
        """logits [N, V] -> the same with -inf where `min_tokens` or a row's mask leaves a token out."""
        early = [index for index, row in enumerate(rows) if self._is_early(row)]
        masked = [index for index, row in enumerate(rows) if row.mask]
        if not early and not masked:
            return logits
        logits = logits.clone()
        if early:
            stop_ids = [ids for index in early if (ids := self._slots[rows[index].slot].stop_ids) is not None]
            logits.index_put_((self._repeated(early, stop_ids), torch.cat(stop_ids)), self._forbidden)
        if masked:
            packed = np.frombuffer(b"".join(rows[index].mask for index in masked), dtype=np.int32)
            masks = to_device(packed.reshape(len(masked), -1).copy(), self._device)
            self._mask(logits, self._tensor(masked), masks)
        return logits

    def force(self, token_ids: Tensor, rows: Sequence[PlannedRow]) -> Tensor:
        """token_ids [N] as chosen -> the same with `</think>` where a thinking budget is spent."""
        budgeted = [index for index, row in enumerate(rows) if self._slots[row.slot].sampling.thinking is not None]
        if not budgeted:
            return token_ids
        slots = [rows[index].slot for index in budgeted]
        index, (limits, _, close_ids) = self._tensor(budgeted), self._marks(slots)
        is_open, used = self._thinking[self._tensor(slots)].unbind(-1)
        token_ids = token_ids.clone()
        token_ids[index] = torch.where((is_open > 0) & (used >= limits), close_ids, token_ids[index])
        return token_ids

    def _penalize(self, logits: Tensor, states: Sequence[SlotState]) -> Tensor:
        def column(values: Sequence[float]) -> Tensor:
            return list_to_device(values, torch.float32, self._device)[:, None]

        places = self._tensor([state.place for state in states])
        counts = self._counts[places]
        occurred = counts > 0
        repetition = column([state.sampling.repetition_penalty for state in states])
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(occurred | self._in_prompt[places], repeated, logits)
        logits = logits - counts * column([state.sampling.frequency_penalty for state in states])
        return logits - occurred * column([state.sampling.presence_penalty for state in states])

    def _think(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """One more output token of each slot, [N]: it opens or closes reasoning, or is part of it."""
        _, open_ids, close_ids = self._marks(slots)
        index = self._tensor(slots)
        is_open, used = self._thinking[index].unbind(-1)
        closes = token_ids == close_ids
        used = used + ((is_open > 0) & ~closes)
        is_open = ((is_open > 0) | (token_ids == open_ids)) & ~closes
        self._thinking[index] = torch.stack([is_open.long(), used], -1)

    def _marks(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Budget, opening id and closing id of each slot, [N] each."""
        budgets = [thinking for slot in slots if (thinking := self._slots[slot].sampling.thinking) is not None]
        rows = [(budget.max_tokens, budget.open_id, budget.close_id) for budget in budgets]
        limits, open_ids, close_ids = self._tensor(rows).unbind(-1)
        return limits, open_ids, close_ids

    def _is_early(self, row: PlannedRow) -> bool:
        state = self._slots[row.slot]
        # A mask already says where a request may stop, and may leave it no other choice.
        return state.stop_ids is not None and row.output_index < state.sampling.min_tokens and not row.mask

    def _take_place(self) -> int:
        if not self._free_places:
            used = len(self._counts)
            more = max(used, _FIRST_PLACES)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocab_size)])
            self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size)])
            self._free_places = list(range(used + more - 1, used - 1, -1))
        return self._free_places.pop()

    def _repeated(self, rows: Sequence[int], ids: Sequence[Tensor]) -> Tensor:
        """Each row as often as it has ids; counted on the host, since a device would have to be waited for."""
        return self._tensor([row for row, own in zip(rows, ids, strict=True) for _ in range(len(own))])

    def _tensor(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        return list_to_device(values, torch.int64, self._device)


def _reasoning_so_far(thinking: ThinkingBudget, output_ids: Sequence[int]) -> tuple[int, int]:
    """Whether reasoning is open after those tokens, and how many it has had."""
    is_open, used = thinking.starts_open, 0
    for token_id in output_ids:
        closes = token_id == thinking.close_id
        used += is_open and not closes
        is_open = (is_open or token_id == thinking.open_id) and not closes
    return int(is_open), used
