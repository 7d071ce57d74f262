"""Who computes what in the next step. Owned by the scheduler; the queues are the roster's.

Decodes come first, one row each, then chunks of prompts in order of admission, then new requests, while the budget
lasts. When pages run out, the strongest decodes get what there is and the weakest requests make way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baleen_worker.admission import Admission, Candidate
from baleen_worker.draft import Draft
from baleen_worker.sequence import Sequence, State

if TYPE_CHECKING:
    from baleen_worker.growth import GrowthEstimate
    from baleen_worker.roster import Roster
    from baleen_worker.slots import Bools


class Planner:
    """`max_step_tokens`: the budget of a step; at least a page. `preemption_threshold`: see `SchedulerLimits`."""

    def __init__(
        self,
        roster: Roster,
        growth: GrowthEstimate,
        *,
        max_step_tokens: int,
        page_size: int,
        preemption_threshold: int,
    ) -> None:
        self._roster = roster
        self._columns = roster.columns
        self._residency = roster.residency
        self._growth = growth
        self._max_step_tokens = max_step_tokens
        self._page_size = page_size
        self._admission = Admission(roster, growth, threshold=preemption_threshold, preempt=self._preempt)
        self._turn = 0  # the slot from which decodes that take turns go on
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def plan(self) -> Draft:
        """The next step; without rows when nothing can be computed before an earlier step is committed."""
        while True:
            num_preemptions = self.num_preemptions
            draft = self._plan_once()
            # Whoever ran last may just have made way at once, and for somebody who has not been looked at since.
            if draft.rows or self.num_preemptions == num_preemptions or self._residency.any_leaving:
                return draft

    def _plan_once(self) -> Draft:
        draft = Draft(self._max_step_tokens, self._columns)
        self._admission.begin()
        # The candidate's pages are found again after the decodes, which may take them.
        prefill_waits = bool(self._roster.prefilling) or self._admission.next() is not None
        # A prompt advances by whole pages: leave it one, or a full house of decodes would hold it back for ever.
        self._plan_decodes(draft, draft.budget - self._page_size if prefill_waits else draft.budget)
        if prefill_waits:
            self._plan_prefills(draft)
        return draft

    # --- decodes ----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: Draft, max_rows: int) -> None:
        """One row for each sequence that has a next token to compute and a page for it."""
        roster, columns = self._roster, self._columns
        if not roster.num_decoding:
            return
        if self._residency.num_available < roster.num_decoding:
            self._make_room()
        # The last token is never computed, and one that depends on the host must have reached it.
        ready = columns.decodes & (columns.num_planned < columns.last)
        if roster.num_host_dependent:
            for slot in ready.nonzero()[0].tolist():
                ready[slot] = not columns.at(slot).awaits_host
        if roster.num_decoding > max_rows:
            self._take_turns(ready, max_rows)
        full = (ready & self._lacks_page()).nonzero()[0]
        if len(full):
            ready[self._residency.grow_each(full)] = False
        draft.add_decodes(ready)

    def _take_turns(self, ready: Bools, max_rows: int) -> None:
        """Leaves `max_rows` of those that are ready: who comes after the last one of the last time, and so on."""
        slots = ready.nonzero()[0]
        first = int(np.searchsorted(slots, self._turn))
        chosen = np.roll(slots, -first)[:max_rows]
        ready[:] = False
        ready[chosen] = True
        if len(chosen):
            self._turn = int(chosen[-1]) + 1

    def _lacks_page(self) -> Bools:
        """Those whose next token has no page yet."""
        columns = self._columns
        return columns.num_planned >= columns.num_pages * self._page_size

    def _make_room(self) -> None:
        """Grants the pages that decodes need where they may not suffice: the strongest first, the weakest make way."""
        needy = (self._columns.decodes & self._lacks_page()).nonzero()[0]
        if len(needy) <= self._residency.num_available:
            return
        strongest_first = sorted(map(self._columns.at, needy.tolist()), key=lambda s: s.strength, reverse=True)
        for sequence in strongest_first:
            while sequence.state is State.RUNNING and not self._residency.grow(sequence):
                if self._residency.any_leaving:
                    return  # their pages come first
                self._preempt(min(self._roster.running(), key=lambda s: s.strength))

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._growth.preempted()
        self._roster.displace(sequence)
        self._admission.begin()

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _plan_prefills(self, draft: Draft) -> None:
        """Chunks of the prompts under way, then of new ones, while the budget lasts."""
        for sequence in list(self._roster.prefilling.values()):
            if draft.budget <= 0:
                return
            self._plan_chunk(draft, sequence)
        while draft.budget > 0:
            candidate = self._admission.next()
            if candidate is None or not self._begin(draft, candidate):
                return

    def _begin(self, draft: Draft, candidate: Candidate) -> bool:
        """Lets a request in, unless the budget does not hold a chunk of it."""
        sequence = candidate.sequence
        if sequence.expects_pages:
            self.num_cached_tokens += self._roster.enter(sequence, candidate.found)
            self._admission.entered(sequence)
            return True
        if self._chunk_len(sequence, len(candidate.found) * self._page_size, draft.budget) == 0:
            return False
        self.num_cached_tokens += self._roster.enter(sequence, candidate.found)
        self._admission.entered(sequence)
        self._plan_chunk(draft, sequence)
        return True

    def _chunk_len(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of the chunk from `start` on: all that remain, or as many as end on a page boundary."""
        remaining = sequence.num_tokens - start
        if start < sequence.num_scored < sequence.num_prompt:  # what was told of the prompt is not told again
            remaining = min(remaining, sequence.num_scored - start)
        if remaining <= budget:
            return remaining
        return max((start + budget) // self._page_size * self._page_size - start, 0)

    def _plan_chunk(self, draft: Draft, sequence: Sequence) -> None:
        """A row for the next chunk, if the budget holds one."""
        length = self._chunk_len(sequence, sequence.num_planned, draft.budget)
        if length == 0:
            return
        if sequence.num_bound == 0:  # the runner has not heard of it
            draft.admit(sequence)
        draft.add_chunk(sequence, length)
        if sequence.num_planned == sequence.num_tokens:
            self._roster.begin_decoding(sequence)
