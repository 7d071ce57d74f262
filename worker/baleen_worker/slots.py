"""What every step changes of the resident sequences, as columns over slots. Owned by the scheduler.

A running sequence has a slot below `max_running_requests`; its counters stand in the columns at that place and nowhere
else, so that a step with thousands of decodes is a few array operations. `Sequence` reads and writes its own place, for
whatever happens one sequence at a time. A slot is taken by `seat`, and void again after `clear`.

Tokens of decodes gather in `recent`, a page of them a slot, until somebody wants the sequence's whole history or the
page is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baleen_worker.news import Audience

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baleen_worker.sequence import Sequence

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


class SlotColumns:
    """Arrays of one entry a slot.

    `runs`: not preempted and not over. `reserves`: does not run yet, but will as soon as its pages have come.
    `decodes`: runs, and its prompt is computed or about to be. `is_plain`: numbers describe all rows of it that decode;
    they have neither mask nor log-probabilities.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.runs: Bools = np.zeros(num_slots, np.bool_)
        self.reserves: Bools = np.zeros(num_slots, np.bool_)
        self.decodes: Bools = np.zeros(num_slots, np.bool_)
        self.is_plain: Bools = np.zeros(num_slots, np.bool_)
        # Facts of the request.
        self.stream: Ints = np.zeros(num_slots, np.int64)
        self.key: NDArray[np.uint64] = np.zeros(num_slots, np.uint64)
        self.priority: Ints = np.zeros(num_slots, np.int64)
        self.last_prompt: Ints = np.zeros(num_slots, np.int64)  # the position of the last prompt token
        self.num_cached: Ints = np.zeros(num_slots, np.int64)
        self.max_len: Ints = np.zeros(num_slots, np.int64)
        self.last: Ints = np.zeros(num_slots, np.int64)  # the position of the last token it may have
        self.num_pages: Ints = np.zeros(num_slots, np.int64)
        self.num_bound: Ints = np.zeros(num_slots, np.int64)
        # What steps move on, see `Sequence`: rows of one array, so that what moves together is moved at once.
        counters: Ints = np.zeros((5, num_slots), np.int64)
        self.num_planned, self.num_pending, self.num_in_flight, self.num_tokens, self.num_recent = counters
        self._planning, self._landing, self._growing = counters[0:3], counters[1:3], counters[3:5]
        self.last_token: Ints = np.zeros(num_slots, np.int64)
        self.recent: NDArray[np.uint32] = np.zeros((num_slots, page_size), np.uint32)
        self._stops = StopTable()
        self._audience: tuple[bytes, Audience] | None = None

    def seat(self, slot: int, sequence: Sequence) -> None:
        """The sequence runs from now on; all that is counted of it starts at zero."""
        self.sequences[slot] = sequence
        self.runs[slot] = True
        self.is_plain[slot] = sequence.is_plain
        self.stream[slot], self.key[slot] = sequence.id
        self.priority[slot] = sequence.request.priority
        self.last_prompt[slot] = sequence.num_prompt - 1
        self.num_cached[slot] = sequence.num_cached or 0
        self.max_len[slot] = sequence.max_len
        self.last[slot] = sequence.max_len - 1
        self.num_tokens[slot] = sequence.num_tokens
        for column in (self.num_planned, self.num_pending, self.num_in_flight, self.num_pages, self.num_bound):
            column[slot] = 0
        self.num_recent[slot] = 0
        self._stops.add(sequence.stop_ids)
        self._audience = None

    def clear(self, slot: int) -> None:
        """The slot is nobody's."""
        sequence = self.sequences[slot]
        assert sequence is not None, "a slot is cleared twice"
        self.sequences[slot] = None
        self.runs[slot] = self.reserves[slot] = self.decodes[slot] = False
        self._stops.remove(sequence.stop_ids)

    def at(self, slot: int) -> Sequence:
        """Whose slot it is."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is nobody's"
        return sequence

    def plan_token(self, slots: Bools) -> None:
        """A row of one token that samples the next is planned for each of the slots."""
        self._planning += slots

    def land_token(self, slots: Bools) -> None:
        """Such a row of each of the slots has landed."""
        np.subtract(self._landing, slots, out=self._landing)

    def append(self, slots: Ints, token_ids: Ints, is_one: Bools) -> None:
        """Each of the slots got a token; `is_one` says the same as `slots`."""
        self.recent[slots, self.num_recent[slots]] = token_ids
        self.last_token[slots] = token_ids
        self._growing += is_one

    def settle(self, slots: Ints) -> None:
        """Hands what is in `recent` of these slots over to their sequences."""
        width = self.recent.itemsize * self.recent.shape[1]
        tokens = self.recent[slots].tobytes()
        lengths = (self.num_recent[slots] * self.recent.itemsize).tolist()
        self.num_recent[slots] = 0
        for place, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            self.at(slot).extend(tokens[place * width : place * width + length])

    def take_recent(self, slot: int) -> bytes:
        """Empties the slot's `recent`; returns what was in it, as uint32."""
        tokens = self.recent[slot, : self.num_recent[slot]].tobytes()
        self.num_recent[slot] = 0
        return tokens

    def audience(self, slots: Ints) -> Audience:
        """Whose slots these are, as their clients know them. The same object while the same slots are asked for."""
        name = slots.tobytes()
        if self._audience is None or self._audience[0] != name:
            self._audience = name, Audience(self.stream[slots], self.key[slots], self.num_cached[slots])
        return self._audience[1]

    def may_stop(self, token_ids: Ints) -> Bools:
        """Which tokens end the answer of some resident sequence, though perhaps not of the one that said it."""
        return self._stops.holds(token_ids)


class StopTable:
    """Which token ids stop anybody."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._flags: Bools = np.zeros(1, np.bool_)  # the last entry stands for all larger ids and is never set

    def add(self, token_ids: frozenset[int]) -> None:
        """One more sequence stops at these."""
        for token_id in token_ids:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
            if token_id >= len(self._flags) - 1:
                self._flags = np.concatenate([self._flags, np.zeros(token_id + 1, np.bool_)])
            self._flags[token_id] = True

    def remove(self, token_ids: frozenset[int]) -> None:
        """One sequence fewer stops at these."""
        for token_id in token_ids:
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]
                self._flags[token_id] = False

    def holds(self, token_ids: Ints) -> Bools:
        """Which of the ids are in the table."""
        return self._flags.take(token_ids, mode="clip")
