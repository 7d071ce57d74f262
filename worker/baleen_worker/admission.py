"""Whether the next waiting request may run, and who makes way for it. Owned by the planner.

It may when a slot is free and the pages it needs now fit beside what running requests are expected to grow by
(`growth.py`). Alone it always may: the scheduler has refused what could never fit. A request that does not fit holds
back those behind it, so none starves. The growth of those who run is summed once a step; who enters is added to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baleen_worker.growth import GrowthEstimate
    from baleen_worker.residency import Found
    from baleen_worker.roster import Roster
    from baleen_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who may run next, and the cached pages it would start from. Valid until pages are granted to anybody."""

    sequence: Sequence
    found: Found


class Admission:
    """Decides; grants nothing. `preempt` takes a running request's place away, for good or when its step has landed."""

    def __init__(
        self, roster: Roster, growth: GrowthEstimate, *, threshold: int, preempt: Callable[[Sequence], None]
    ) -> None:
        self._roster = roster
        self._residency = roster.residency
        self._growth = growth
        self._threshold = threshold
        self._preempt = preempt
        self._expected: int | None = None  # tokens that those who run are expected to add, while that is known
        self._blocked: tuple[Sequence, int] | None = None  # who did not fit, and into how much room

    def begin(self) -> None:
        """A step is planned, or somebody made way: who runs, and what is expected of them, is to be seen anew."""
        self._expected = None

    def entered(self, sequence: Sequence) -> None:
        """The candidate runs."""
        if self._expected is not None:
            self._expected += self._growth.tokens(sequence.max_len - sequence.num_tokens)

    def next(self) -> Candidate | None:
        """The next request, if it may run beside those that do."""
        waiting = self._roster.waiting
        if not len(waiting):
            return None
        has_slot = self._residency.has_free_slot
        if not has_slot and not self._anyone_below(waiting.top_priority):
            return None
        sequence = waiting.first()
        assert sequence is not None, "somebody waits"
        if has_slot:
            room = self.room()
            if self._blocked != (sequence, room):
                found = self._residency.find(sequence)
                if self._fits(sequence, found, room):
                    self._blocked = None
                    return Candidate(sequence, found)
                self._blocked = (sequence, room)
        self._make_way(sequence)
        return None

    def room(self) -> int:
        """Pages that can be had and that nobody is expected to grow into. May be negative."""
        if self._expected is None:
            columns = self._roster.columns
            grows = columns.runs | columns.reserves
            self._expected = self._growth.total((columns.max_len - columns.num_tokens)[grows])
        return self._residency.num_available - self._residency.pages_for(self._expected)

    def _fits(self, sequence: Sequence, found: Found, room: int) -> bool:
        needed = self._residency.num_new_pages(sequence, found)
        if not self._roster.num_running and not self._roster.columns.reserves.any():
            return needed <= self._residency.num_available
        grows = self._growth.tokens(sequence.max_len - sequence.num_tokens)
        return needed + self._residency.pages_for(grows) <= room

    def _anyone_below(self, priority: int) -> bool:
        """Whether somebody runs who must make way for that priority."""
        columns = self._roster.columns
        return bool((columns.priority[columns.runs] < priority - self._threshold).any())

    def _make_way(self, sequence: Sequence) -> None:
        """Preempts the weakest of those far enough below; the next plan looks again."""
        priority = sequence.request.priority
        if self._residency.any_leaving or not self._anyone_below(priority):
            return  # the room of those who leave comes first
        below = (other for other in self._roster.running() if other.request.priority < priority - self._threshold)
        self._preempt(min(below, key=lambda other: other.strength))
