"""Host memory as a second tier of the prefix cache: which pages are there, and what is to be copied. Owns no bytes.

A page is named by a 128-bit digest of its tokens and of all before it, the tenant's salt included, so entries need no
tree: a page that was found on the device is followed on the host by asking for one digest after another, until one is
missing. Latents and index keys of all layers are one unit here as they are there. The least recently used entry makes
room; one that is about to be copied back is kept until that copy is in a plan.

Copies travel in step plans, out before back, before anything is computed: so a page that was evicted and granted again
within one plan is still copied as it was, and one copied back is there before any row reads it. The policy says when
pages go out: `write_through` as soon as they are full, `write_back` when the device evicts them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from baleen_worker.cache.events import CacheEvent, EventLog
from baleen_worker.step import PageCopies

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIGEST_BYTES = 16


class WritePolicy(enum.Enum):
    """When a page is copied to the host."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class HostPage:
    """`number` is its place in host memory, `hash` its name in events."""

    number: int
    hash: int


class HostTier:
    """Entries of at most `num_pages`."""

    def __init__(self, num_pages: int, policy: WritePolicy) -> None:
        if num_pages < 1:
            raise ValueError("a host tier without pages cannot keep anything")
        self.policy = policy
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, HostPage] = OrderedDict()
        self._pinned: set[bytes] = set()
        self._out: dict[int, int] = {}  # host page to page: the last writer of a place is the one that counts
        self._back: list[tuple[int, int]] = []
        self._log = EventLog(on_host=True)
        self.num_stored_pages = 0
        self.num_fetched_pages = 0

    def __len__(self) -> int:
        """Pages it keeps."""
        return len(self._entries)

    @property
    def capacity(self) -> int:
        """Pages it may keep."""
        return self._num_pages

    # --- what is there ----------------------------------------------------------------------------------------------

    def find(self, digest: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """Digests of the pages that follow the one named `digest`, whose tokens are `keys`, up to the first miss."""
        found: list[bytes] = []
        for key in keys:
            digest = page_digest(digest, key)
            if digest not in self._entries:
                break
            found.append(digest)
        return found

    def put(self, digest: bytes, key: bytes, page: int, page_hash: int, parent_hash: int | None) -> None:
        """Keeps what `page` contains, if there is room; the page is copied before anything is computed again."""
        if digest in self._entries:
            self._entries.move_to_end(digest)
            return
        number = self._free.pop() if self._free else self._evict()
        if number is None:
            return
        self._entries[digest] = HostPage(number, page_hash)
        self._out[number] = page
        self.num_stored_pages += 1
        self._log.stored(page_hash, parent_hash, key)

    # --- copying back -----------------------------------------------------------------------------------------------

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keeps entries that were found until the next `take`."""
        self._pinned.update(digests)

    def fetch(self, digest: bytes, page: int) -> None:
        """Copies a pinned entry into `page`."""
        assert digest in self._pinned, "a page is copied back from an entry that may be gone"
        self._entries.move_to_end(digest)
        self._back.append((self._entries[digest].number, page))
        self.num_fetched_pages += 1

    def take(self) -> PageCopies | None:
        """The copies asked for since the last call; they are to be made before the next step is computed."""
        self._pinned.clear()
        if not self._out and not self._back:
            return None
        copies = PageCopies([(page, number) for number, page in self._out.items()], self._back)
        self._out, self._back = {}, []
        return copies

    # --- the rest ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets everything, copies that were still to be made included. The device's own event tells of it."""
        assert not self._back, "the tier is cleared while pages are copied back"
        self._free += [entry.number for entry in self._entries.values()]
        self._entries.clear()
        self._out.clear()
        self._log.take()

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call."""
        return self._log.take()

    def check(self) -> None:
        """Asserts that every place is free or has one entry, and that copies refer to entries."""
        numbers = [entry.number for entry in self._entries.values()]
        assert sorted([*numbers, *self._free]) == list(range(self._num_pages)), "a host page is lost or kept twice"
        assert set(self._out) <= set(numbers), "a copy goes to a host page that is nobody's"
        assert {number for number, _ in self._back} <= set(numbers), "a copy comes from a host page that is nobody's"
        assert self._pinned <= set(self._entries), "an entry that was pinned is gone"

    def _evict(self) -> int | None:
        digest = next((digest for digest in self._entries if digest not in self._pinned), None)
        if digest is None:
            return None
        entry = self._entries.pop(digest)
        self._log.removed(entry.hash)
        return entry.number


def root_digest(salt: str) -> bytes:
    """Where the digests of one tenant's pages start."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def page_digest(before: bytes, key: bytes) -> bytes:
    """The digest of the page with the tokens `key` behind the one with the digest `before`."""
    return blake2b(before + key, digest_size=_DIGEST_BYTES).digest()
