"""Who may run: slots, and pages reserved for as far as a request may ever grow. Owned by the scheduler.

A sequence enters with its whole reservation and takes pages out of it as it grows, so growing never fails. It leaves
with everything at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baleen_worker.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baleen_worker.cache.pages import PagePool


class Residency:
    """Slots below `max_running_requests` and the reservations on one pool of pages."""

    def __init__(self, max_running_requests: int, page_size: int, pages: PagePool) -> None:
        self._num_slots = max_running_requests
        self._page_size = page_size
        self._pages = pages
        self._free_slots = list(range(max_running_requests - 1, -1, -1))
        self._leaving: set[Sequence] = set()
        self._num_reserved_pages = 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self._page_size)

    @property
    def num_free_slots(self) -> int:
        """Slots that no sequence holds."""
        return len(self._free_slots)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a slot is free and the whole reservation fits beside the others."""
        room = self._pages.capacity - self._num_reserved_pages
        return bool(self._free_slots) and sequence.reserved_pages <= room

    def enter(self, sequence: Sequence) -> None:
        """Grants a slot and the reservation; there must be room."""
        assert self.has_room(sequence), "a sequence enters without room"
        self._num_reserved_pages += sequence.reserved_pages
        sequence.slot = self._free_slots.pop()
        sequence.state = State.RUNNING

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Pages that the sequence lacks to hold `num_tokens`; they are appended to it and returned."""
        new_pages = self._pages.alloc(self.pages_for(num_tokens) - len(sequence.pages))
        sequence.pages += new_pages
        return new_pages

    def leave(self, sequence: Sequence) -> None:
        """The sequence is over. It keeps all it holds while steps in flight refer to it: see `landed`."""
        sequence.state = State.FINISHED
        if sequence.num_in_flight == 0:
            self._release(sequence)
        else:
            self._leaving.add(sequence)

    def landed(self, sequence: Sequence) -> None:
        """A step that referred to a sequence which is over has been collected."""
        if sequence.num_in_flight == 0:
            self._leaving.remove(sequence)
            self._release(sequence)

    def check(self, running: Iterable[Sequence]) -> None:
        """Asserts that every page, reservation and slot is accounted for exactly once. Costs O(pages)."""
        holders = [*running, *self._leaving]
        self._pages.check(page for sequence in holders for page in sequence.pages)
        assert self._num_reserved_pages == sum(s.reserved_pages for s in holders), "reservations do not add up"
        assert self._num_reserved_pages <= self._pages.capacity, "more pages are reserved than exist"
        assert all(len(s.pages) <= s.reserved_pages for s in holders), "a sequence outgrew its reservation"
        slots = sorted([*self._free_slots, *(s.slot for s in holders)])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"

    def _release(self, sequence: Sequence) -> None:
        self._pages.free(sequence.pages)
        sequence.pages = []
        self._num_reserved_pages -= sequence.reserved_pages
        self._free_slots.append(sequence.slot)
