"""The pages of the fake runner: whose they are, where in a prompt, and which states they hold.

Finds a page that is foreign, stale, granted twice, given back too early, overwritten while others read it, or never
written. Owns no notion of a step or of tokens to come.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baleen_worker.request import SamplingParams
    from baleen_worker.step import DevicePages, PageCopies, PlannedRow, Region

PAGE_SIZE = 64
START_STATE = 0x9E3779B97F4A7C15
# Of a page on its way to another worker: place, number of states, number of ids, state before; states; ids.
_PAGE_FORMAT = struct.Struct(f"<iHHQ{PAGE_SIZE}Q{PAGE_SIZE}I")
PAGE_BYTES = _PAGE_FORMAT.size

# Rows of one request that may be computed again: as many as steps are ever in flight, and one.
_MAX_REPEATABLE = 4


class ViolationError(Exception):
    """A row's tokens or pages are not what they must be."""


class Owner:
    """One stay of a request in a slot: whose pages those in its table are.

    `sampled` are recent tokens by position, `recent_starts` those of the rows that may be computed again.
    """

    __slots__ = (
        "answer",
        "lost",
        "next_check",
        "next_start",
        "num_prompt",
        "recent_starts",
        "sampled",
        "sampling",
        "table",
    )

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.table: list[int] = []
        self.next_start = 0
        self.recent_starts: deque[int] = deque(maxlen=_MAX_REPEATABLE)
        self.next_check = 0
        self.num_prompt: int | None = None  # as the first row that samples implies
        self.sampled: dict[int, int] = {}
        self.lost: str | None = None
        self.answer: tuple[int, ...] | None = None  # what a script makes it say

    def computed(self, start: int, num_tokens: int) -> int:
        """Notes a row that is computed, perhaps again; returns where it ends."""
        while self.recent_starts and self.recent_starts[-1] >= start:  # later rows will be repeated as well
            self.recent_starts.pop()
        self.recent_starts.append(start)
        self.next_start = start + num_tokens
        if len(self.sampled) > 2 * _MAX_REPEATABLE:
            del self.sampled[next(iter(self.sampled))]
        return self.next_start


class _Page:
    """`states[o]` is the hash state after the token at offset o, `entry` the one before; `owners` have it in tables."""

    __slots__ = ("entry", "owners", "place", "states", "token_ids")

    def __init__(self) -> None:
        self.owners: set[Owner] = set()
        self.place = -1
        self.entry = 0
        self.states: list[int] = []
        self.token_ids: list[int] = []

    def lose(self, lost: str) -> None:
        """Takes the page from its owners."""
        for owner in self.owners:
            owner.lost = lost
        self.owners.clear()

    def become(self, other: _Page) -> None:
        """Takes over what another page contains."""
        self.place, self.entry = other.place, other.entry
        self.states, self.token_ids = other.states.copy(), other.token_ids.copy()

    def reset(self, lost: str, place: int) -> None:
        """Takes the page from its owners and empties it."""
        self.lose(lost)
        self.place = place
        self.states = []
        self.token_ids = []

    def forget_dead(self, live: Mapping[int, Owner]) -> None:
        """Keeps the number of owners within twice the number of slots."""
        if len(self.owners) > 2 * len(live):
            self.owners.intersection_update(live.values())


class FakePages:
    """All pages by number; page 0 is the sink. `num_host_pages` more are in host memory, with nothing in them."""

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        self._pages: list[_Page] = [_Page() for _ in range(num_pages)]
        self._host = [_Page() for _ in range(num_host_pages)]
        self._freed: set[int] = set()
        self._owners: dict[int, Owner] = {}
        self._lock = threading.Lock()  # of what is freed: a transfer fills pages from a thread of its own

    @property
    def num_pages(self) -> int:
        """The sink counts, those in host memory do not."""
        return len(self._pages)

    def admit(self, slot: int, sampling: SamplingParams) -> None:
        """A request takes a slot; what it held before is void."""
        self._owners[slot] = Owner(sampling)

    def owner_of(self, slot: int) -> Owner | None:
        """Who has the slot."""
        return self._owners.get(slot)

    def poison(self, pages: Sequence[int]) -> None:
        """The pages are free: no row may read them any more. A copy to the host still may, until the next `copy`."""
        with self._lock:
            for number in pages:
                self._pages[number].lose(f"its page {number} was freed")
            self._freed.update(pages)

    def copy(self, copies: PageCopies | None) -> None:
        """Moves pages as a plan asks, and empties what was freed before. ViolationError for a page that is not full."""
        for number, host_number in () if copies is None else copies.out:
            page = self._pages[number]
            if len(page.states) < PAGE_SIZE:
                raise ViolationError(f"page {number} goes to the host with {len(page.states)} tokens in it")
            self._host[host_number].become(page)
        with self._lock:
            for number in self._freed:
                self._pages[number].reset(f"its page {number} was freed", place=-1)
            self._freed.clear()
        for host_number, number in () if copies is None else copies.back:
            if len(self._host[host_number].states) < PAGE_SIZE:
                raise ViolationError(f"host page {host_number} comes back, but nothing was ever copied there")
            self._pages[number].reset(f"its page {number} was overwritten from the host", place=-1)
            self._pages[number].become(self._host[host_number])

    def copy_out(self, pages: Sequence[int], into: memoryview) -> None:
        """What pages contain, as [pages, PAGE_BYTES]."""
        for at, number in enumerate(pages):
            page = self._pages[number]
            ids, states = page.token_ids[:PAGE_SIZE], page.states[:PAGE_SIZE]
            padded = states + [0] * (PAGE_SIZE - len(states)) + ids + [0] * (PAGE_SIZE - len(ids))
            _PAGE_FORMAT.pack_into(into, at * PAGE_BYTES, page.place, len(states), len(ids), page.entry, *padded)

    def copy_in(self, pages: Sequence[int], data: memoryview) -> None:
        """Inverse of `copy_out`. Whoever had one of the pages in a table has lost it."""
        for at, number in enumerate(pages):
            place, num_states, num_ids, entry, *padded = _PAGE_FORMAT.unpack_from(data, at * PAGE_BYTES)
            page = self._pages[number]
            with self._lock:
                self._freed.discard(number)
                page.reset(f"its page {number} was overwritten by a transfer", place)
            page.entry, page.states = entry, padded[:num_states]
            page.token_ids = padded[PAGE_SIZE : PAGE_SIZE + num_ids]

    def bind(self, owner: Owner, row: PlannedRow) -> str | None:
        """Extends the owner's page table; returns what is wrong with the grant."""
        if row.first_new_page > len(owner.table):
            return f"its table has {len(owner.table)} pages and is extended from {row.first_new_page}"
        # What precedes a request's first row was found in the cache, or came from another worker with a page in part.
        num_found = 0 if owner.table else -(-row.start // PAGE_SIZE)
        for place, number in enumerate(row.new_pages, row.first_new_page):
            if not 0 < number < len(self._pages):
                return f"page {number} is the sink or does not exist"
            if place < len(owner.table):
                if owner.table[place] != number:  # only a repeated row may name pages again, and the same ones
                    return f"page {owner.table[place]} of its table is replaced by {number}"
                continue
            page = self._pages[number]
            if owner in page.owners:
                return f"page {number} is granted to it twice"
            if place < num_found:
                problem = self._why_not_found(owner, place, page, min(row.start - place * PAGE_SIZE, PAGE_SIZE))
                if problem is not None:
                    return f"page {number} is given to it as computed, but {problem}"
                page.forget_dead(self._owners)
            else:
                page.reset(f"its page {number} was granted to another request", place)
            page.owners.add(owner)
            owner.table.append(number)
        if num_found:
            owner.next_start = row.start
        return None

    def _why_not_found(self, owner: Owner, place: int, page: _Page, num_tokens: int) -> str | None:
        if len(page.states) < num_tokens:
            return f"holds {len(page.states)} tokens"
        if page.place != place:
            return f"is page {page.place} of a prompt, not page {place}"
        before = START_STATE if place == 0 else self._pages[owner.table[place - 1]].states[-1]
        return None if page.entry == before else "does not continue the page before it"

    def check_page(self, owner: Owner, place: int, num_computed: int) -> None:
        """The page at `place` is the owner's, and holds the positions below `num_computed` that fall into it."""
        page = self._pages[owner.table[place]]
        if owner not in page.owners or page.place != place:
            raise ViolationError(f"page {owner.table[place]} is not its page {place}")
        if len(page.states) < min(num_computed - place * PAGE_SIZE, PAGE_SIZE):
            raise ViolationError(f"page {owner.table[place]} lacks positions that were computed")

    def state_at(self, owner: Owner, position: int) -> int:
        """The state after the token at `position`."""
        place, offset = divmod(position, PAGE_SIZE)
        self.check_page(owner, place, position + 1)
        return self._pages[owner.table[place]].states[offset]

    def write(self, owner: Owner, start: int, before: int, states: list[int]) -> None:
        """Keeps the states of consecutive tokens; `before` is the one they continue."""
        written = 0
        while written < len(states):
            place, offset = divmod(start + written, PAGE_SIZE)
            self.check_page(owner, place, start + written)
            page = self._pages[owner.table[place]]
            count = min(PAGE_SIZE - offset, len(states) - written)
            new = states[written : written + count]
            old = page.states[offset : offset + count]
            if len(page.owners) > 1 and old != new[: len(old)]:
                raise ViolationError(f"page {owner.table[place]}, which others read, is overwritten")
            if offset == 0:
                page.entry = states[written - 1] if written else before
            page.states[offset : offset + count] = new
            written += count

    def write_ids(self, owner: Owner, start: int, token_ids: Iterable[int]) -> None:
        """What a script is matched against: pages keep ids too, so that a prompt is known however it came into them."""
        for position, token_id in enumerate(token_ids, start):
            place, offset = divmod(position, PAGE_SIZE)
            self._pages[owner.table[place]].token_ids[offset : offset + 1] = [token_id]

    def ids(self, owner: Owner, num_tokens: int) -> list[int]:
        """The first `num_tokens` token ids of what the owner has computed."""
        held = [token_id for number in owner.table for token_id in self._pages[number].token_ids]
        return held[:num_tokens]


class FakePageStore:
    """The `PageStore` over these pages."""

    page_bytes = PAGE_BYTES
    regions: Sequence[Region] = ()
    device: DevicePages | None = None

    def __init__(self, pages: FakePages) -> None:
        self._pages = pages
        self.num_pages = pages.num_pages

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """See `PageStore`: these pages are no bytes, whichever are asked for."""
        del pages
        return []

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        """See `PageStore`."""
        self._pages.copy_out(pages, into)

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """See `PageStore`."""
        self._pages.copy_in(pages, data)
