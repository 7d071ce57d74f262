"""Who holds what: slots, pages of its own, and a place in the prefix cache. Owned by the scheduler.

A sequence enters with pages for all the tokens it has, those found in the cache among them, takes one more whenever it
outgrows them, and leaves with everything at once. Pages that it has filled become the cache's while it runs, so that
others find them; what it computed outlives it there until the room is needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baleen_worker.cache.prefix import page_keys
from baleen_worker.sequence import Sequence
from baleen_worker.slots import SlotColumns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from baleen_worker.cache.pages import PagePool
    from baleen_worker.cache.prefix import PrefixCache, PrefixNode
    from baleen_worker.slots import Ints

_KEY_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Found:
    """Cached pages that a sequence could start from: a path in the tree, then pages that the host tier has."""

    path: list[PrefixNode]
    on_host: list[bytes]

    def __len__(self) -> int:
        return len(self.path) + len(self.on_host)


class Residency:
    """Slots below `max_running_requests`, one pool of pages, and its cache, if there is one."""

    def __init__(self, max_running_requests: int, page_size: int, pages: PagePool, cache: PrefixCache | None) -> None:
        self._num_slots = max_running_requests
        self._page_size = page_size
        self._pages = pages
        self._cache = cache
        self._free_slots = list(range(max_running_requests - 1, -1, -1))
        self._leaving: set[Sequence] = set()
        self.columns = SlotColumns(max_running_requests, page_size)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self._page_size)

    def generations_of(self, pages: list[int]) -> list[int]:
        """See `PagePool.generation`."""
        return [self._pages.generation(page) for page in pages]

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and those the cache keeps for nobody in particular."""
        return self._pages.num_free + (0 if self._cache is None else self._cache.num_idle)

    @property
    def any_leaving(self) -> bool:
        """Whether slots and pages come back when the steps in flight land."""
        return bool(self._leaving)

    # --- entering and growing -------------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Found:
        """Cached pages the sequence could start from. Its last token is always computed, because its logits are needed,
        unless another worker has done so.

        Log-probabilities of the prompt need the logits of all its tokens, so those that are still to be told are
        computed as well.
        """
        cache, request = self._cache, sequence.request
        if cache is None:
            return Found([], [])
        num_tokens = sequence.num_tokens - (0 if sequence.expects_pages else 1)
        if request.sampling.prompt_logprobs is not None and sequence.num_scored < sequence.num_prompt - 1:
            num_tokens = min(num_tokens, sequence.num_scored)
        max_pages = num_tokens // self._page_size
        if max_pages == 0:
            return Found([], [])
        if len(sequence.keys) != sequence.num_tokens * _KEY_BYTES_PER_TOKEN:
            sequence.keys = page_keys(sequence.token_ids)
        path = cache.find(sequence.salt, sequence.keys, max_pages)
        return Found(path, cache.find_on_host(sequence.salt, sequence.keys, path, max_pages))

    def num_new_pages(self, sequence: Sequence, found: Found) -> int:
        """Pages that can be had now and that entering with a cached prefix would take; the host's need some as well."""
        idle = 0 if self._cache is None else self._cache.num_idle_in(found.path)
        return self._num_pages(sequence) - len(found.path) + idle

    def _num_pages(self, sequence: Sequence) -> int:
        """Pages to enter with: a decode leg needs room for the token that comes with its pages."""
        return self.pages_for(sequence.num_tokens + sequence.expects_pages)

    def enter(self, sequence: Sequence, found: Found) -> None:
        """Grants a slot and pages for all tokens; there must be room. The cached ones need not be computed."""
        path = found.path
        slot = self._free_slots.pop()
        sequence.sit(slot, self.columns)
        cache = self._cache
        if cache is not None:
            sequence.node = path[-1] if path else cache.root(sequence.salt)
            cache.hold(sequence.node)
            sequence.num_attached = len(path)
            self.columns.num_planned[slot] = len(found) * self._page_size
            if cache.host is not None:
                cache.host.pin(found.on_host)  # the pages granted next may be evicted to where these are
        sequence.pages = [node.page for node in path]
        sequence.pages += self._take(self._num_pages(sequence) - len(path))
        self.columns.num_pages[slot] = len(sequence.pages)
        if found.on_host:
            self._fetch(sequence, found)

    def _fetch(self, sequence: Sequence, found: Found) -> None:
        """Copies the host's pages into the sequence's own, which are the cache's from then on."""
        assert self._cache is not None, "pages were found without a cache"
        host = self._cache.host
        assert host is not None, "pages were found in a tier that is not there"
        for place, digest in enumerate(found.on_host, len(found.path)):
            host.fetch(digest, sequence.pages[place])
        self.attach(sequence, len(found) * self._page_size)

    def grow(self, sequence: Sequence) -> bool:
        """Grants one more page, if one can be had."""
        if self.num_available == 0:
            return False
        sequence.pages += self._take(1)
        self.columns.num_pages[sequence.slot] += 1
        return True

    def grow_each(self, slots: Ints) -> Ints:
        """Grants one more page to each of the slots, as far as pages can be had; returns the slots that got none."""
        pages = self._take(min(len(slots), self.num_available))
        for slot, page in zip(slots.tolist(), pages, strict=False):
            self.columns.at(slot).pages.append(page)
        self.columns.num_pages[slots[: len(pages)]] += 1
        return slots[len(pages) :]

    def attach(self, sequence: Sequence, num_computed: int) -> None:
        """The keys of the first `num_computed` tokens are in the pages: full pages become the cache's."""
        cache, node = self._cache, sequence.node
        if cache is None or node is None:
            return
        size, pages, keys = self._page_size, sequence.pages, sequence.keys
        num_full = num_computed // size
        for place in range(sequence.num_attached, num_full):
            first = place * size
            end = (first + size) * _KEY_BYTES_PER_TOKEN
            if end <= len(keys):
                key = keys[first * _KEY_BYTES_PER_TOKEN : end]
            else:
                key = page_keys(sequence.token_ids[first : first + size])
            page = pages[place]
            node = cache.extend(node, key, page)
            if node.page != page:
                sequence.duplicates.append(page)
        sequence.num_attached = max(sequence.num_attached, num_full)
        sequence.node = node

    # --- leaving --------------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> bool:
        """The sequence is over or preempted. It keeps all it holds while steps in flight refer to it: see `landed`.

        Returns whether it holds nothing any more.
        """
        if sequence.num_in_flight == 0:
            self._release(sequence)
            return True
        self._leaving.add(sequence)
        return False

    def landed(self, sequence: Sequence) -> bool:
        """A step that referred to a leaving sequence was collected. Returns whether it holds nothing any more."""
        if sequence.num_in_flight:
            return False
        self._leaving.remove(sequence)
        self._release(sequence)
        return True

    def check(self, running: Iterable[Sequence], quarantined: Collection[int] = ()) -> None:
        """Asserts that every page, hold and slot is accounted for exactly once. Costs O(pages)."""
        holders = [*running, *self._leaving]
        own = [page for s in holders for page in (*s.pages[s.num_attached :], *s.duplicates)]
        if self._cache is None:
            assert all(s.num_attached == 0 and s.node is None for s in holders), "a hold on a cache that is not there"
        else:
            own += self._cache.check(Counter(s.node for s in holders if s.node is not None))
        self._pages.check(own, quarantined)
        for sequence in holders:
            path = _path_to(sequence.node)
            assert len(path) == sequence.num_attached, "a sequence holds another place in the cache than it says"
            for place, node in enumerate(path):
                first = place * self._page_size
                assert node.key == page_keys(sequence.token_ids[first : first + self._page_size]), "foreign tokens"
                page = sequence.pages[place]
                assert node.page == page or page in sequence.duplicates, "a page of the table is not the cache's"
        slots = sorted([*self._free_slots, *(s.slot for s in holders)])
        assert slots == list(range(self._num_slots)), "a slot is lost or held twice"

    def _take(self, count: int) -> list[int]:
        short = count - self._pages.num_free
        if short > 0 and self._cache is not None:
            self._cache.evict(short)
        return self._pages.alloc(count)

    def _release(self, sequence: Sequence) -> None:
        self._pages.free(sequence.pages[sequence.num_attached :] + sequence.duplicates)
        if self._cache is not None and sequence.node is not None:
            self._cache.release(sequence.node)
        self._free_slots.append(sequence.slot)
        sequence.keys = b""
        sequence.vacate()


def _path_to(node: PrefixNode | None) -> list[PrefixNode]:
    path: list[PrefixNode] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
