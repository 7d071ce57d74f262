"""Whether the next waiting request may run, and who makes way for it. Owned by the scheduler.

It may when a slot is free and the pages it needs now fit beside what running requests are expected to grow by
(`growth.py`). Alone it always may: the scheduler has refused what could never fit. A request that does not fit holds
back those behind it, so none starves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from baleen_worker.cache.prefix import PrefixNode
    from baleen_worker.growth import GrowthEstimate
    from baleen_worker.residency import Residency
    from baleen_worker.sequence import Sequence
    from baleen_worker.waiting import WaitingRoom


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who may run next, and the cached pages it would start from. Valid until pages are granted to anybody."""

    sequence: Sequence
    path: list[PrefixNode]


class Admission:
    """Decides; grants nothing. `preempt` takes a running request's place away, for good or when its step has landed."""

    def __init__(
        self,
        waiting: WaitingRoom,
        residency: Residency,
        growth: GrowthEstimate,
        *,
        preemption_threshold: int,
        preempt: Callable[[Sequence], None],
    ) -> None:
        self._waiting = waiting
        self._residency = residency
        self._growth = growth
        self._threshold = preemption_threshold
        self._preempt = preempt
        self._blocked: tuple[Sequence, int] | None = None  # who did not fit, and into how much room

    def next(self, running: Collection[Sequence]) -> Candidate | None:
        """The next request, if it may run beside those `running`."""
        if not len(self._waiting):
            return None
        if not self._residency.has_free_slot and not self._anyone_below(running):
            return None
        sequence = self._waiting.first()
        assert sequence is not None, "somebody waits"
        room = self._room(running)
        if self._residency.has_free_slot and self._blocked != (sequence, room):
            path = self._residency.find(sequence)
            if self._fits(sequence, path, room, alone=not running):
                self._blocked = None
                return Candidate(sequence, path)
            self._blocked = (sequence, room)
        self._make_way(sequence, running)
        return None

    def _room(self, running: Collection[Sequence]) -> int:
        """Pages that can be had and that nobody is expected to grow into. May be negative."""
        expect = self._growth.tokens
        tokens = sum(expect(sequence.max_len - len(sequence.token_ids)) for sequence in running)
        return self._residency.num_available - self._residency.pages_for(tokens)

    def _fits(self, sequence: Sequence, path: list[PrefixNode], room: int, *, alone: bool) -> bool:
        needed = self._residency.num_new_pages(sequence, path)
        if alone:
            return needed <= self._residency.num_available
        grows = self._growth.tokens(sequence.max_len - len(sequence.token_ids))
        return needed + self._residency.pages_for(grows) <= room

    def _anyone_below(self, running: Collection[Sequence]) -> bool:
        """Whether somebody runs who must make way for the highest priority that waits."""
        limit = self._waiting.top_priority - self._threshold
        return any(sequence.request.priority < limit for sequence in running)

    def _make_way(self, sequence: Sequence, running: Collection[Sequence]) -> None:
        """Preempts the weakest of those far enough below; the next plan looks again."""
        if self._residency.any_leaving:
            return  # their room comes first
        limit = sequence.request.priority - self._threshold
        below = [other for other in running if other.request.priority < limit]
        if below:
            self._preempt(min(below, key=lambda other: other.strength))
