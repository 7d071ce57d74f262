"""Owns which KV pages are free. A page is a number; what it contains is the runner's business.

A page is free, used (a request or the prefix cache holds it), or quarantined (nobody uses it, but something outside the
engine may still read or write it: a transfer that was cut short). Page 0 is the sink: padded rows write there, so it is
never granted. Every operation costs O(1) a page, whatever the size of the pool.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

SINK_PAGE = 0

_FREE, _USED, _QUARANTINED = 0, 1, 2


class PagePool:
    """Grants pages 1 … num_pages-1. Callers never ask for more than `num_free`."""

    def __init__(self, num_pages: int, *, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        """`num_pages` counts the sink; at least one more is needed to serve anything.

        `on_free` hears of pages as they become free, before anybody can be granted them: tests poison them there.
        """
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages cannot serve: it needs the sink and at least one more")
        self._free = list(range(num_pages - 1, SINK_PAGE, -1))
        self._states = bytearray(num_pages)
        self._generations = array("Q", bytes(8 * num_pages))
        self._num_quarantined = 0
        self._on_free = on_free

    @property
    def capacity(self) -> int:
        """Pages that can be granted, the sink excluded."""
        return len(self._states) - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Pages that may not be granted yet."""
        return self._num_quarantined

    @property
    def num_used(self) -> int:
        """Pages somebody holds."""
        return self.capacity - len(self._free) - self._num_quarantined

    def alloc(self, count: int) -> list[int]:
        """Grants `count` pages."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free ones"
        first = len(self._free) - count
        pages = self._free[first:]
        del self._free[first:]
        for page in pages:
            self._states[page] = _USED
            self._generations[page] += 1
        return pages

    def generation(self, page: int) -> int:
        """How often the page has been granted: by this, who reads it from outside sees whether it is another's now."""
        return self._generations[page]

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; each must be granted."""
        self._move(pages, _USED, _FREE, "is freed but was not granted")
        self._reclaim(pages)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Takes granted pages back without making them free: see the module."""
        self._move(pages, _USED, _QUARANTINED, "is quarantined but was not granted")
        self._num_quarantined += len(pages)

    def discharge(self, pages: Sequence[int]) -> None:
        """Makes quarantined pages free: whatever might have touched them has provably ended."""
        self._move(pages, _QUARANTINED, _FREE, "is discharged but was not quarantined")
        self._num_quarantined -= len(pages)
        self._reclaim(pages)

    def check(self, held: Iterable[int], quarantined: Collection[int] = ()) -> None:
        """Asserts that `held` are exactly the granted pages, each held once, and all pages are accounted for."""
        held = list(held)
        assert len(held) == len(set(held)), "a page is held twice"
        assert all(self._states[page] == _USED for page in held), "a page is held but not granted"
        assert len(held) == self.num_used, f"{self.num_used} pages are granted but {len(held)} are held"
        assert all(self._states[page] == _QUARANTINED for page in quarantined), "a page is not in quarantine"
        assert len(quarantined) == self._num_quarantined, "a page in quarantine is forgotten"
        assert self._states.count(_FREE) - 1 == len(self._free), "the free list and the states disagree"
        assert not self._states[SINK_PAGE], "the sink page was granted"

    def _move(self, pages: Sequence[int], before: int, after: int, complaint: str) -> None:
        for page in pages:
            assert self._states[page] == before, f"page {page} {complaint}"
            self._states[page] = after

    def _reclaim(self, pages: Sequence[int]) -> None:
        if pages and self._on_free is not None:
            self._on_free(pages)
        self._free += pages
