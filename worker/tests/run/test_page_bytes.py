"""Pages as bytes: where they are is what `read` copies, whichever pages are asked for."""

from __future__ import annotations

import pytest
import torch
from baleen_worker.cache.page_bytes import PoolPages
from baleen_worker.cache.storage import FP8, KvLayout, PagedPools
from baleen_worker.transfer.digests import Digests
from xxhash import xxh3_64_intdigest

LAYOUT = KvLayout(3, (True, False, True), 512, 64, 128, FP8, FP8, index_hadamard=True, model_digest="0" * 64)


def make_pools(seed: int) -> PoolPages:
    pools = PagedPools(LAYOUT, 12, device=torch.device("cpu"), dtype=torch.bfloat16)
    torch.manual_seed(seed)
    for layer in range(LAYOUT.num_layers):
        for store in pools.page_stores(layer):
            store.random_(0, 255)
    return PoolPages(pools)


def contents(pages: PoolPages, numbers: list[int]) -> list[bytes]:
    """As [N, B]."""
    copied = memoryview(bytearray(len(numbers) * pages.page_bytes))
    pages.read(numbers, copied)
    return [bytes(copied[start : start + pages.page_bytes]) for start in range(0, len(copied), pages.page_bytes)]


@pytest.mark.parametrize("theirs", [[1], [3, 4, 5, 9], [2, 1, 11, 10]])
@pytest.mark.parametrize("ours", [[1], [4, 5, 6, 7], [7, 2, 3, 8]])
def test_views_of_any_pages_are_those_pages(theirs: list[int], ours: list[int]) -> None:
    theirs, ours = theirs[: len(ours)], ours[: len(theirs)]
    source, own = make_pools(1), make_pools(2)
    before = contents(own, [*range(12)])
    sent = b"".join(view.tobytes() for view in source.views(theirs))
    views = own.views(ours)
    digests = Digests(views, len(ours))
    for number, view in enumerate(views, 1):
        view.reshape(-1)[:] = memoryview(sent)[: view.size]
        sent = sent[view.size :]
        digests.go_on(number)
    assert not sent
    assert contents(own, ours) == contents(source, theirs)
    assert digests.of_pages() == [xxh3_64_intdigest(page) for page in contents(source, theirs)]
    after = contents(own, [*range(12)])
    assert all(after[page] == before[page] for page in range(12) if page not in ours)


def test_neighbours_share_a_view() -> None:
    """Else a page would be a hundred entries in every system call."""
    assert [len(view) for view in make_pools(1).views([3, 4, 5, 9])] == [3, 1] * 5
