"""XXH3-64 of pages in host memory, taken where they are while they come in or go out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from xxhash import xxh3_64

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Digests:
    """Of pages that come store by store, see `PageStore.views`."""

    def __init__(self, views: Sequence[NDArray[np.uint8]], num_pages: int) -> None:
        self._views = views
        self._hashes = [xxh3_64() for _ in range(num_pages)]
        self._num_done = self._place = 0

    def go_on(self, num_done: int) -> None:
        """So many views are filled."""
        for view in self._views[self._num_done : num_done]:
            end = self._place + len(view)
            # Thousands of small pieces: a loop in Python would cost as much as the hashing.
            deque(map(xxh3_64.update, self._hashes[self._place : end], view), maxlen=0)
            self._place = end % len(self._hashes)
        self._num_done = max(self._num_done, num_done)

    def of_pages(self) -> list[int]:
        """All of them, once all views are filled."""
        assert self._num_done == len(self._views), "pages are judged before they are here"
        return [page.intdigest() for page in self._hashes]


def digests_in_place(views: Sequence[NDArray[np.uint8]], num_pages: int) -> list[int]:
    """Of pages that are here."""
    digests = Digests(views, num_pages)
    digests.go_on(len(views))
    return digests.of_pages()
