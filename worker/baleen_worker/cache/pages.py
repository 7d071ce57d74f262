"""Owns which KV pages are free. A page is a number; what it contains is the runner's business.

Page 0 is the sink: padded rows write there, so it is never granted. Every operation costs O(1) a page, whatever the
size of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SINK_PAGE = 0


class PagePool:
    """Grants pages 1 … num_pages-1. Callers never ask for more than `num_free`: admission has reserved them."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the sink; at least one more is needed to serve anything."""
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages cannot serve: it needs the sink and at least one more")
        self._free = list(range(num_pages - 1, SINK_PAGE, -1))
        self._granted = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Pages that can be granted, the sink excluded."""
        return len(self._granted) - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages somebody holds."""
        return self.capacity - len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Grants `count` pages."""
        assert 0 <= count <= len(self._free), f"{count} pages asked of {len(self._free)} free ones"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._granted[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; each must be granted."""
        for page in pages:
            assert self._granted[page], f"page {page} is freed but was not granted"
            self._granted[page] = 0
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Asserts that `held` are exactly the granted pages, each held once, and that all others are free."""
        held = list(held)
        assert len(held) == len(set(held)), "a page is held twice"
        assert all(self._granted[page] for page in held), "a page is held but not granted"
        assert len(held) == self.num_used, f"{self.num_used} pages are granted but {len(held)} are held"
        assert sum(self._granted) == self.num_used, "the free list and the grants disagree"
        assert not self._granted[SINK_PAGE], "the sink page was granted"
