"""The prefix cache by itself: what is found, what is kept, what goes first, and what is said about it."""

from __future__ import annotations

import random

import pytest
from baleen_worker.cache.events import PagesCleared, PagesRemoved, PagesStored
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache, PrefixNode, page_keys
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 64


def tokens(seed: int, num_pages: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(129280) for _ in range(num_pages * SIZE)]


class Shelf:
    """A cache with its pool."""

    def __init__(self, num_pages: int = 33, max_idle_pages: int | None = None) -> None:
        self.pages = PagePool(num_pages)
        self.cache = PrefixCache(self.pages, max_idle_pages=max_idle_pages)

    def store(self, token_ids: list[int], salt: str = "") -> PrefixNode:
        """Stores full pages and holds the last of them."""
        node = self.cache.root(salt)
        self.cache.hold(node)
        for start in range(0, len(token_ids), SIZE):
            [page] = self.pages.alloc(1)
            node = self.cache.extend(node, page_keys(token_ids[start : start + SIZE]), page)
            if node.page != page:
                self.pages.free([page])
        return node

    def find(self, token_ids: list[int], salt: str = "", max_pages: int = 1000) -> int:
        """Pages found."""
        return len(self.cache.find(salt, page_keys(token_ids), max_pages))

    def check(self, *held: PrefixNode) -> None:
        counts = {node: held.count(node) for node in held}
        self.pages.check(self.cache.check(counts))


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_long_prompts_that_part_anywhere_are_found_as_by_comparing_them(seed: int) -> None:
    """Prompts of up to 60 pages, each as an earlier one up to a page and then otherwise, while others are evicted."""
    draw = random.Random(seed)
    shelf = Shelf(num_pages=400)
    pages_of = [tuple(draw.randrange(10**6) for _ in range(60))]  # a page's tokens are its number, 64 times
    stored: set[tuple[int, ...]] = set()  # every path of pages in the tree
    for step in range(40):
        base = draw.choice(pages_of)
        fork = draw.choice([0, 1, 15, 16, 17, 31, 32, 33, draw.randrange(61)])
        pages = (*base[:fork], *(draw.randrange(10**6) for _ in range(60 - fork)))[: draw.randrange(1, 61)]
        found = shelf.find([number for number in pages for _ in range(SIZE)])
        assert found == max((n for n in range(1, len(pages) + 1) if pages[:n] in stored), default=0), f"step {step}"
        if shelf.pages.num_free < 60:
            shelf.cache.evict(draw.randrange(shelf.cache.num_idle + 1))
            shelf.check()
            stored = {path for path in stored if shelf.find([n for n in path for _ in range(SIZE)]) == len(path)}
            assert len(stored) == shelf.cache.num_pages
            continue
        shelf.cache.release(shelf.store([number for number in pages for _ in range(SIZE)]))
        shelf.check()
        pages_of.append((*pages, *(draw.randrange(10**6) for _ in range(60 - len(pages)))))
        stored |= {pages[:n] for n in range(1, len(pages) + 1)}


def test_what_was_stored_is_found_up_to_the_first_page_that_differs() -> None:
    shelf = Shelf()
    prompt = tokens(1, 4)
    node = shelf.store(prompt)
    assert shelf.find(prompt) == 4
    assert shelf.find([*prompt, 1, 2, 3]) == 4
    assert shelf.find(prompt[:-1]) == 3, "a page is found whole or not at all"
    assert shelf.find(prompt, max_pages=2) == 2
    changed = prompt.copy()
    changed[2 * SIZE + 5] += 1
    assert shelf.find(changed) == 2
    assert shelf.find(prompt[SIZE:]) == 0, "a page depends on all that comes before it"
    shelf.check(node)


def test_tenants_find_nothing_of_each_other() -> None:
    shelf = Shelf()
    prompt = tokens(1, 2)
    ours = shelf.store(prompt, "us")
    assert (shelf.find(prompt, "us"), shelf.find(prompt, "them"), shelf.find(prompt)) == (2, 0, 0)
    theirs = shelf.store(prompt, "them")
    assert shelf.cache.num_pages == 4
    assert {node.hash for node in shelf.cache.find("us", page_keys(prompt), 9)}.isdisjoint(
        node.hash for node in shelf.cache.find("them", page_keys(prompt), 9)
    )
    shelf.check(ours, theirs)


def test_a_fork_shares_pages_and_the_second_to_compute_a_page_keeps_its_own() -> None:
    shelf = Shelf()
    stem = tokens(1, 3)
    first, second, third = (shelf.store(stem + tokens(seed, 1)) for seed in (2, 3, 4))
    assert shelf.cache.num_pages == 6
    assert first.parent is second.parent is third.parent
    shelf.check(first, second, third)
    for node in (first, second, third):
        shelf.cache.release(node)
    shelf.check()
    shelf.cache.evict(2)
    assert [shelf.find(stem + tokens(seed, 1)) for seed in (2, 3, 4)] == [3, 3, 4]
    shelf.check()


def test_the_least_recently_used_leaf_goes_first_and_what_is_held_stays() -> None:
    shelf = Shelf()
    old, middle, held = tokens(1, 2), tokens(2, 2), tokens(3, 2)
    for prompt in (old, middle):
        shelf.cache.release(shelf.store(prompt))
    kept = shelf.store(held)
    path = shelf.cache.find("", page_keys(old), 9)
    shelf.cache.hold(path[-1])
    shelf.cache.release(path[-1])  # used again: now younger than `middle`
    shelf.cache.evict(1)
    assert (shelf.find(old), shelf.find(middle), shelf.find(held)) == (2, 1, 2)
    shelf.cache.evict(3)
    assert (shelf.find(old), shelf.find(middle), shelf.find(held)) == (0, 0, 2)
    with pytest.raises(AssertionError, match="are to be evicted"):
        shelf.cache.evict(1)
    shelf.check(kept)


def test_the_size_cap_bounds_what_is_kept_for_nobody() -> None:
    shelf = Shelf(max_idle_pages=3)
    first = shelf.store(tokens(1, 5))
    assert shelf.cache.num_pages == 5
    shelf.cache.release(first)
    assert (shelf.cache.num_pages, shelf.cache.num_idle, shelf.find(tokens(1, 5))) == (3, 3, 3)
    shelf.check()


def test_events_tell_what_is_stored_removed_and_cleared() -> None:
    shelf = Shelf()
    stem, tail = tokens(1, 2), tokens(2, 1)
    node = shelf.store(stem)
    [stored] = shelf.cache.take_events()
    assert isinstance(stored, PagesStored)
    assert (stored.parent_hash, list(stored.token_ids), len(set(stored.page_hashes))) == (None, stem, 2)
    longer = shelf.store(stem + tail)
    [branch] = shelf.cache.take_events()
    assert isinstance(branch, PagesStored)
    assert (branch.parent_hash, list(branch.token_ids)) == (stored.page_hashes[-1], tail)
    for held in (node, longer):
        shelf.cache.release(held)
    shelf.cache.evict(2)
    [removed] = shelf.cache.take_events()
    assert removed == PagesRemoved([branch.page_hashes[0], stored.page_hashes[1]])
    assert shelf.cache.clear() == 1
    assert shelf.cache.take_events() == [PagesCleared()]
    assert shelf.pages.num_free == shelf.pages.capacity


def test_quarantined_pages_are_neither_used_nor_free() -> None:
    pool = PagePool(6)
    pages = pool.alloc(3)
    pool.quarantine(pages[:2])
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (2, 1, 2)
    pool.check(pages[2:], pages[:2])
    with pytest.raises(AssertionError, match="was not granted"):
        pool.free(pages[:1])
    with pytest.raises(AssertionError, match="in quarantine is forgotten"):
        pool.check(pages[2:])
    pool.discharge(pages[:2])
    assert (pool.num_free, pool.num_quarantined) == (4, 0)
