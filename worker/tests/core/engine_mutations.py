"""Faults of the engine's cache, put in on purpose: a pytest plugin; see `mutated.py` and `test_engine_mutations.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import mutated
from baleen_worker.admission import Admission
from baleen_worker.cache import host, host_pool, prefix
from baleen_worker.cache.host import HostTier
from baleen_worker.cache.host_pool import CopyingRunner
from baleen_worker.cache.prefix import PrefixCache, PrefixNode
from baleen_worker.cache.storage import PagedPools

# pyright: reportPrivateUsage=false

_copy_layer, _put, _fetch = host_pool._copy_layer, HostTier.put, HostTier.fetch


def _another_host_page(self: HostTier, digest: bytes, page: int) -> None:
    _fetch(self, digest, page)
    number, _ = self._back[-1]
    self._back[-1] = ((number + 1) % len(self), page)


def _another_page(self: HostTier, digest: bytes, key: bytes, page: int, *names: Any) -> None:
    _put(self, digest, key, max(page - 1, 1), *names)


def _evict_pinned(self: HostTier) -> int | None:
    entry = self._entries.pop(next(iter(self._entries)))
    self._log.removed(entry.hash)
    return entry.number


def _put_first_only(self: HostTier, digest: bytes, *page: Any) -> None:
    if digest in self._entries or self._free:
        _put(self, digest, *page)


def _latents_alone(stores: Sequence[Any], kept: Sequence[Any], out: Sequence[Any], back: Sequence[Any]) -> None:
    _copy_layer(stores, kept, out, ())
    _copy_layer(stores[:1], kept[:1], (), back)


def _index_keys_alone(stores: Sequence[Any], kept: Sequence[Any], out: Sequence[Any], back: Sequence[Any]) -> None:
    _copy_layer(stores, kept, out, ())
    _copy_layer(stores[1:], kept[1:], (), back)


def _back_before_out(stores: Sequence[Any], kept: Sequence[Any], out: Sequence[Any], back: Sequence[Any]) -> None:
    _copy_layer(stores, kept, (), back)
    _copy_layer(stores, kept, out, ())


def _poison_at_once(self: CopyingRunner, pages: Sequence[int]) -> None:
    self._poison(pages)


def _unasked(*methods: str) -> list[mutated.Patch]:
    """Methods of the pools that ask nobody whether the layer has come."""

    def hasty(method: Callable[..., Any]) -> Callable[..., Any]:
        def access(self: PagedPools, *arguments: Any) -> Any:
            asked, self.before_access = self.before_access, lambda _: None
            try:
                return method(self, *arguments)
            finally:
                self.before_access = asked

        return access

    return [(PagedPools, name, hasty(getattr(PagedPools, name))) for name in methods]


def _key_alone(before: bytes, key: bytes) -> bytes:
    del before
    return blake2b(key, digest_size=16).digest()


def _one_root(salt: str) -> bytes:
    del salt
    return bytes(16)


def _find_past_gaps(self: HostTier, digest: bytes, keys: Iterable[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for key in keys:
        digest = host.page_digest(digest, key)
        if digest in self._entries:
            found.append(digest)
    return found


def _hold_nothing_above(self: PrefixCache, node: PrefixNode) -> None:
    node.holders += 1
    self._idle.pop(node, None)


MUTATIONS: dict[str, list[mutated.Patch]] = {
    "another host page is fetched": [(HostTier, "fetch", _another_host_page)],
    "another page is stored": [(HostTier, "put", _another_page)],
    "what is about to come back makes way": [(HostTier, "_evict", _evict_pinned)],
    "nothing makes way on the host": [(HostTier, "put", _put_first_only)],
    "index keys stay on the host": [(host_pool, "_copy_layer", _latents_alone)],
    "latents stay on the host": [(host_pool, "_copy_layer", _index_keys_alone)],
    "copies back before copies out": [(host_pool, "_copy_layer", _back_before_out)],
    "poisoned before it is copied out": [(CopyingRunner, "poison", _poison_at_once)],
    "layers are not waited for": _unasked("read_latent", "write_latent", "read_index_k", "write_index_k"),
    "digests forget what came before": [(module, "page_digest", _key_alone) for module in (host, prefix)],
    "tenants share the host": [(module, "root_digest", _one_root) for module in (host, prefix)],
    "chains go on behind a gap": [(HostTier, "find", _find_past_gaps)],
    "pages above a held one are evicted": [(PrefixCache, "hold", _hold_nothing_above)],
    "nobody makes way for the important": [(Admission, "_make_way", lambda *_: None)],
}

mutated.apply(MUTATIONS)
