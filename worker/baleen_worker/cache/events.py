"""What a prefix cache says about itself: pages stored, removed, or all gone. Plain data, in the order in which it
happened; routers rebuild from it which prompt would find what where.

A page is named by a 64-bit hash of its tokens and of everything before it, the tenant's salt included. The name is part
of the worker contract (`worker.proto`, `KvStored`): a router computes it from a prompt. It serves routers only;
the cache itself compares tokens, so two prompts with equal names share nothing.
"""

from __future__ import annotations

import sys
from array import array

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest


class PagesStored(msgspec.Struct, array_like=True, tag="stored"):
    """Consecutive pages of one prefix. `parent_hash` None: the first of them begins a prompt.

    `keys` are the tokens of all pages, end to end, as little-endian uint32: what the cache has at hand. `on_host`: the
    pages are kept in host memory, not on the device.
    """

    page_hashes: list[int]
    parent_hash: int | None
    keys: bytearray
    on_host: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        unpacked = array("I", bytes(self.keys))
        if sys.byteorder != "little":
            unpacked.byteswap()
        return unpacked.tolist()


class PagesRemoved(msgspec.Struct, array_like=True, tag="removed"):
    """Pages that are no longer found, each after the pages that follow it."""

    page_hashes: list[int]
    on_host: bool = False


class PagesCleared(msgspec.Struct, array_like=True, tag="cleared"):
    """The cache is empty, on the device and on the host."""


CacheEvent = PagesStored | PagesRemoved | PagesCleared


class EventLog:
    """Gathers the events of one step; what belongs together becomes one event."""

    def __init__(self, *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._events: list[CacheEvent] = []

    def stored(self, page_hash: int, parent_hash: int | None, key: bytes) -> None:
        """One more page, below the one named `parent_hash`; `key` are its tokens as little-endian uint32."""
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesStored) and parent_hash == last.page_hashes[-1]:
            last.page_hashes.append(page_hash)
            last.keys += key
        else:
            self._events.append(PagesStored([page_hash], parent_hash, bytearray(key), self._on_host))

    def removed(self, page_hash: int) -> None:
        """One page fewer."""
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesRemoved):
            last.page_hashes.append(page_hash)
        else:
            self._events.append(PagesRemoved([page_hash], self._on_host))

    def cleared(self) -> None:
        """No page is left, whatever was said before."""
        self._events = [PagesCleared()]

    def take(self) -> list[CacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def root_hash(salt: str) -> int:
    """Where the hashes of one tenant's pages start."""
    return xxh3_64_intdigest(salt.encode())


def page_hash(parent_hash: int, key: bytes) -> int:
    """The hash of a page below another; `key` are its tokens as little-endian uint32."""
    # The digest is the canonical, big-endian one.
    return xxh3_64_intdigest(parent_hash.to_bytes(8, "little") + xxh3_64_digest(key)[::-1])
