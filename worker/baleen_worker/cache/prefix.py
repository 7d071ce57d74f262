"""Which pages hold the keys of which tokens: a radix tree over whole pages, so that a prompt finds what was computed.

A node is one page; the path from a root to it spells the tokens of the page and of all before it, which is what its
keys depend on. Every tenant has a root of its own, so nobody learns from timing what others have asked. A page is one
unit: latents and index keys of all layers, found together or not at all. A page in the tree is full and never written
again.

A node that somebody holds keeps its page, and so do those above it: `holders` counts direct holds and held children,
so holding and releasing touch only the part of the path whose state changes. Pages that nobody holds are *idle*; they
wait in the order in which they were released, children before their parents, so the first is always a leaf and the
least recently used. Looks up in O(pages of the prompt), many at a time where the tree does not part, and holds O(1)
memory a page.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from baleen_worker.cache.events import CacheEvent, EventLog, page_hash, root_hash
from baleen_worker.cache.host import HostTier, WritePolicy, page_digest, root_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from baleen_worker.cache.pages import PagePool

PAGE_SIZE_TOKENS = 64
_KEY_BYTES = 4 * PAGE_SIZE_TOKENS
# Pages that a look-up passes at once where a prompt goes on as one before it did.
_RUN_PAGES = 16
_RUN_BYTES = _RUN_PAGES * _KEY_BYTES


def page_keys(token_ids: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32, in which the tree compares them."""
    packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if sys.byteorder != "little":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


class PrefixNode:
    """One page and its place. Of a root, `parent` is None and `page` means nothing.

    Most pages are followed by one other: that one is kept without a table, which saves the look-up's hash and most of
    the node's memory. `depth` counts pages up to this one; where it is a multiple of _RUN_PAGES, `run` is the first
    such number of pages that came to follow, for as long as they are there.
    """

    __slots__ = ("depth", "digest", "hash", "holders", "key", "only_child", "page", "parent", "run", "table")

    def __init__(self, parent: PrefixNode | None, key: bytes, page: int, hashed: int) -> None:
        self.parent = parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.run: Run | None = None
        self.key = key
        self.page = page
        self.hash = hashed
        self.digest = b""  # its name in the host tier, where there is one
        self.holders = 0
        self.only_child: PrefixNode | None = None
        self.table: dict[bytes, PrefixNode] | None = None

    def children(self) -> Iterable[PrefixNode]:
        """The pages that follow this one."""
        if self.table is not None:
            return self.table.values()
        return () if self.only_child is None else (self.only_child,)

    def child(self, key: bytes) -> PrefixNode | None:
        """The page that follows with those tokens."""
        if self.table is not None:
            return self.table.get(key)
        only = self.only_child
        return only if only is not None and only.key == key else None

    def add(self, child: PrefixNode) -> None:
        """Links a page whose tokens no other child has."""
        if self.table is not None:
            self.table[child.key] = child
        elif self.only_child is None:
            self.only_child = child
        else:
            self.table = {self.only_child.key: self.only_child, child.key: child}
            self.only_child = None

    def remove(self, child: PrefixNode) -> None:
        """Unlinks a page."""
        if self.table is None:
            self.only_child = None
            return
        del self.table[child.key]
        if len(self.table) == 1:
            [self.only_child] = self.table.values()
            self.table = None


class Run:
    """Consecutive pages: their tokens end to end, and their nodes."""

    __slots__ = ("key", "nodes")

    def __init__(self, nodes: list[PrefixNode]) -> None:
        self.key = b"".join([node.key for node in nodes])
        self.nodes = nodes


class PrefixCache:
    """The tree over one pool. Every page in it is granted by the pool and goes back there when it is evicted."""

    def __init__(self, pages: PagePool, *, max_idle_pages: int | None = None, host: HostTier | None = None) -> None:
        """`max_idle_pages` bounds what is kept for nobody in particular; None: the pool itself does.

        `host` keeps pages that this pool may not have any more.
        """
        self._pages = pages
        self.host = host
        self._max_idle_pages = max_idle_pages
        self._roots: dict[str, PrefixNode] = {}
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()
        self._num_pages = 0
        self._log = EventLog()

    @property
    def num_pages(self) -> int:
        """Pages in the tree, held or idle."""
        return self._num_pages

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds: each can be evicted."""
        return len(self._idle)

    def find(self, salt: str, keys: bytes, max_pages: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix of `keys`, at most `max_pages` of them. Holds nothing."""
        node = self._roots.get(salt)
        path: list[PrefixNode] = []
        if node is None:
            return path
        start, end = 0, min(len(keys) // _KEY_BYTES, max_pages) * _KEY_BYTES
        while start < end:
            run = node.run
            if run is not None and start + _RUN_BYTES <= end and keys[start : start + _RUN_BYTES] == run.key:
                path += run.nodes
                node = run.nodes[-1]
                start += _RUN_BYTES
                continue
            child = node.child(keys[start : start + _KEY_BYTES])
            if child is None:
                break
            path.append(child)
            node = child
            start += _KEY_BYTES
        return path

    def root(self, salt: str) -> PrefixNode:
        """A tenant's root, made at first use; it must be held at once, since roots without pages are forgotten."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode(None, salt.encode(), -1, root_hash(salt))
            if self.host is not None:
                node.digest = root_digest(salt)
        return node

    def find_on_host(self, salt: str, keys: bytes, path: Sequence[PrefixNode], max_pages: int) -> list[bytes]:
        """Digests of the pages that follow a path which `find` has found, as far as the host has them."""
        if self.host is None or not len(self.host):
            return []
        digest = path[-1].digest if path else root_digest(salt)
        end = min(len(keys), max_pages * _KEY_BYTES) - _KEY_BYTES + 1
        starts = range(len(path) * _KEY_BYTES, end, _KEY_BYTES)
        return self.host.find(digest, (keys[start : start + _KEY_BYTES] for start in starts))

    def num_idle_in(self, path: Sequence[PrefixNode]) -> int:
        """How many of a path's pages are idle: what a hold of its last node takes from those that can be evicted."""
        for index, node in enumerate(reversed(path)):
            if node.holders:
                return index
        return len(path)

    def hold(self, node: PrefixNode) -> None:
        """Keeps a node and all above it until `release`."""
        while True:
            node.holders += 1
            if node.holders > 1 or node.parent is None:
                return
            del self._idle[node]
            node = node.parent

    def release(self, node: PrefixNode) -> None:
        """Undoes one `hold`. The pages stay in the tree until their room is needed."""
        while True:
            node.holders -= 1
            if node.holders:
                break
            if node.parent is None:
                self._forget_root_if_bare(node)
                break
            self._idle[node] = None
            node = node.parent
        if self._max_idle_pages is not None and len(self._idle) > self._max_idle_pages:
            self.evict(len(self._idle) - self._max_idle_pages)

    def extend(self, node: PrefixNode, key: bytes, page: int) -> PrefixNode:
        """Moves a hold from `node` to its child under `key`, which becomes `page` if there was none.

        The caller looks at the child's `page`: when it is another one, the same tokens were computed twice and the
        caller keeps the page it brought.
        """
        child = node.child(key)
        if child is None:
            hashed = page_hash(node.hash, key)
            child = PrefixNode(node, key, page, hashed)
            node.add(child)
            if child.depth % _RUN_PAGES == 0:
                _note_run(child)
            child.holders = 1  # the hold of its parent goes on as that of a held child
            self._num_pages += 1
            self._log.stored(hashed, _name_of(node), key)
            if self.host is not None:
                child.digest = page_digest(node.digest, key)
                if self.host.policy is WritePolicy.WRITE_THROUGH:
                    self._copy_out(child, self.host)
        else:
            self.hold(child)
            node.holders -= 1
        return child

    def evict(self, count: int) -> None:
        """Gives the `count` least recently used idle pages back to the pool; there must be as many."""
        assert count <= len(self._idle), f"{count} pages are to be evicted of {len(self._idle)} idle ones"
        freed: list[int] = []
        for _ in range(count):
            node, _ = self._idle.popitem(last=False)
            freed.append(self._remove_leaf(node))
        self._pages.free(freed)

    def clear(self) -> int:
        """Drops every page, none of which may be held; returns how many there were."""
        count = self._num_pages
        assert count == len(self._idle), "the cache is cleared while pages are held"
        self.evict(count)
        self._log.cleared()
        if self.host is not None:
            self.host.clear()
        return count

    def take_events(self) -> list[CacheEvent]:
        """What changed since the last call, on the device and then on the host."""
        return self._log.take() + ([] if self.host is None else self.host.take_events())

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children())

    def check(self, num_held: dict[PrefixNode, int]) -> list[int]:
        """Asserts that holds, idle pages and links are right, given who holds how often; returns all pages."""
        nodes = [*self.nodes(), *self._roots.values()]
        present = set(nodes)
        for node in nodes:
            children = list(node.children())
            held_children = sum(child.holders > 0 for child in children)
            assert node.holders == num_held.get(node, 0) + held_children, "the holds on a page do not add up"
            assert all(child.parent is node for child in children), "a page hangs below another than it says"
            if node.run is not None:
                assert _nodes_of_run(node.run.nodes[-1]) == (node, node.run.nodes), "a run is not what follows its page"
                assert node.run.key == b"".join(n.key for n in node.run.nodes), "a run has other tokens than its pages"
                assert all(child in present for child in node.run.nodes), "a run leads to pages that are gone"
            if node.parent is None:
                assert node.holders or children, "a root is kept for nothing"
            else:
                assert (node in self._idle) == (node.holders == 0), "an idle page is held or a held one idle"
        places = {node: place for place, node in enumerate(self._idle)}
        for node, place in places.items():
            above = places.get(node.parent) if node.parent is not None else None
            assert above is None or above > place, "a page would be evicted before the one that follows it"
        pages = [node.page for node in nodes if node.parent is not None]
        assert len(pages) == self._num_pages, "pages of the tree are miscounted"
        if self.host is not None:
            self.host.check()
        return pages

    def _remove_leaf(self, node: PrefixNode) -> int:
        parent = node.parent
        assert parent is not None, "a root was idle"
        assert not list(node.children()), "a page is evicted before those that follow it"
        if self.host is not None and self.host.policy is WritePolicy.WRITE_BACK:
            self._copy_out(node, self.host)
        parent.remove(node)
        if node.depth % _RUN_PAGES == 0:
            _forget_run(node)
        self._num_pages -= 1
        self._log.removed(node.hash)
        if parent.parent is None:
            self._forget_root_if_bare(parent)
        return node.page

    def _copy_out(self, node: PrefixNode, host: HostTier) -> None:
        assert node.parent is not None, "a root has no page"
        host.put(node.digest, node.key, node.page, node.hash, _name_of(node.parent))

    def _forget_root_if_bare(self, root: PrefixNode) -> None:
        if not root.holders and root.only_child is None and root.table is None:
            del self._roots[root.key.decode()]


def _nodes_of_run(last: PrefixNode) -> tuple[PrefixNode, list[PrefixNode]]:
    """The node before the run that ends with this one, and the run's nodes."""
    nodes: list[PrefixNode] = []
    node = last
    for _ in range(_RUN_PAGES):
        nodes.append(node)
        assert node.parent is not None, "a page lies less deep than it says"
        node = node.parent
    return node, nodes[::-1]


def _note_run(last: PrefixNode) -> None:
    """The last page of a run has come."""
    before, nodes = _nodes_of_run(last)
    if before.run is None:
        before.run = Run(nodes)


def _forget_run(last: PrefixNode) -> None:
    """The last page of a run goes."""
    before, _ = _nodes_of_run(last)
    if before.run is not None and before.run.nodes[-1] is last:
        before.run = None


def _name_of(node: PrefixNode) -> int | None:
    """What events call the page before another; None: there is none."""
    return None if node.parent is None else node.hash
