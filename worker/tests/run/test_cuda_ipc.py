"""Pages from one process's GPU memory into another's: two GPUs where there are two, else one for both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from baleen_kernels.page_digest import page_digest
from baleen_worker.cache.page_bytes import PoolPages
from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.cache.storage import BFLOAT16, FP8
from baleen_worker.transfer.actions import Arrived, Begun, Failed, Report
from baleen_worker.transfer.cuda_ipc import CudaIpc
from baleen_worker.transfer.lending import Backend, LoanError
from baleen_worker.transfer.orders import Cancel, Expect, LegNews, Peer, Probe, ProbeEnded, Receive
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.tcp import TcpTransfer
from cuda_peer import DECODE, PREFILL, TIMERS, PrefillProcess, contents, make_layout, make_pools

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

NUM_PAGES = 40
LAYERS = 5
PAGES, OWN = [3, 4, 9, 8, 20, 39], [11, 30, 12, 1, 2, 25]


class Decode:
    """The decode side, in this process, on the last GPU. All of its pages are poisoned."""

    def __init__(self, latent_format: str, backend: Backend) -> None:
        self.device = torch.device("cuda", torch.cuda.device_count() - 1)
        self.pools = make_pools(make_layout(LAYERS, latent_format), NUM_PAGES, self.device)
        self.pools.poison(range(NUM_PAGES))
        torch.cuda.synchronize(self.device)
        self.store = PoolPages(self.pools)
        lender = None if backend is Backend.TCP else CudaIpc(self.store)
        self.transfer = TcpTransfer(
            self.store, lambda _: 1, DECODE, TIMERS, vocab_size=10, listen=None, reading=Reading(backend, lender)
        )
        self.told: dict[bytes, list[Report]] = {}
        self.tried: list[ProbeEnded] = []

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until something is told."""
        deadline_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline_s, f"still waiting; told so far: {self.told}"
            self.transfer.wait(0.05)
            for news in self.transfer.take():
                if isinstance(news, LegNews):
                    self.told.setdefault(news.key[0], []).append(news.report)
                else:
                    self.tried.append(news)

    def wait_for(self, key: bytes, kind: type[Report]) -> None:
        """Until that is told of the leg."""
        self.wait(lambda: any(isinstance(report, kind) for report in self.told.get(key, [])))

    def expect(self, prefill: PrefillProcess, key: bytes, num_pages: int) -> None:
        """Asks for a leg, until its peer has begun."""
        peer = Peer(prefill.address, PREFILL.boot_epoch, 0)
        self.transfer.give([Expect((key, 0), peer, num_pages, 0)])
        self.wait_for(key, Begun)

    def take(self, prefill: PrefillProcess, key: bytes, pages: list[int]) -> None:
        """The same, and reserves pages."""
        self.expect(prefill, key, len(pages))
        self.transfer.give([Receive((key, 0), 0, pages)])

    def probe(self, prefill: PrefillProcess) -> str | None:
        """Why pages would not come."""
        self.transfer.give([Probe(0, Peer(prefill.address, PREFILL.boot_epoch, 0))])
        self.tried.clear()
        self.wait(lambda: bool(self.tried))
        return self.tried[0].failure

    def check(self, came: dict[int, int]) -> None:
        """Own pages by the peer's: those have come bit by bit, and all others are as they were, but nobody's."""
        for layer in range(LAYERS):
            for number, store in enumerate(self.pools.page_stores(layer)):
                expected = torch.full_like(store, 0xFF)
                theirs = contents(layer, number, store)
                for page, own in came.items():
                    expected[own] = theirs[page]
                first = SINK_PAGE + 1
                assert torch.equal(store[first:], expected[first:]), f"layer {layer}, store {number}"


@pytest.fixture(params=[FP8, BFLOAT16])
def latent_format(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def prefill(latent_format: str) -> Iterator[PrefillProcess]:
    with PrefillProcess(make_layout(LAYERS, latent_format), NUM_PAGES, "0") as process:
        yield process


@pytest.fixture
def decode(latent_format: str) -> Iterator[Decode]:
    side = Decode(latent_format, Backend.CUDA_IPC)
    yield side
    side.transfer.close()


def test_every_byte_comes_and_no_other_page_changes(prefill: PrefillProcess, decode: Decode) -> None:
    prefill.ask("offer", b"a", PAGES)
    decode.take(prefill, b"a", OWN)
    decode.wait_for(b"a", Arrived)
    decode.check(dict(zip(PAGES, OWN, strict=True)))
    assert decode.transfer.counters.num_pages_received == len(PAGES)
    assert decode.probe(prefill) is None
    # A page that was granted anew after it was announced, and poisoned, is noticed; what is offered instead is taken.
    prefill.ask("offer", b"b", PAGES)
    decode.expect(prefill, b"b", len(PAGES))
    prefill.ask("grant", PAGES[2])
    decode.transfer.give([Receive((b"b", 0), 0, OWN)])
    decode.wait(lambda: prefill.ask("stale_reads") == 1)
    assert Arrived not in map(type, decode.told[b"b"])
    prefill.ask("again", b"b", [*PAGES[:2], 30, *PAGES[3:]])
    decode.wait_for(b"b", Arrived)
    # A page that changes under its generation is not taken at all.
    prefill.ask("offer", b"c", PAGES)
    decode.expect(prefill, b"c", len(PAGES))
    prefill.ask("spoil", PAGES[0])
    decode.transfer.give([Receive((b"c", 0), 0, OWN)])
    decode.wait_for(b"c", Failed)
    assert decode.transfer.counters.num_damaged_reads > 1


def test_a_peer_may_die_while_its_memory_is_mapped(prefill: PrefillProcess, decode: Decode) -> None:
    assert decode.probe(prefill) is None
    lender = CudaIpc(decode.store)
    mapped = lender.borrow(prefill.ask("lend"))
    prefill.ask("offer", b"a", PAGES)
    decode.expect(prefill, b"a", len(PAGES))
    prefill.kill()
    decode.transfer.give([Receive((b"a", 0), 0, OWN)])
    decode.wait_for(b"a", Failed)
    mapped.fill(PAGES, OWN)()  # the memory is there for as long as somebody has it mapped
    decode.check({0: 0} | dict(zip(PAGES, OWN, strict=True)))  # the trial has filled the sink page
    mapped.close()
    assert torch.ones(8, device=decode.device).sum().item() == 8
    decode.transfer.give([Cancel((b"a", 0))])


def test_pages_on_a_device_come_over_tcp_too(latent_format: str) -> None:
    decode = Decode(latent_format, Backend.AUTO)
    with PrefillProcess(make_layout(LAYERS, latent_format), NUM_PAGES, "0", Backend.TCP) as prefill:
        prefill.ask("offer", b"a", PAGES)
        decode.take(prefill, b"a", OWN)
        decode.wait_for(b"a", Arrived)
        decode.check(dict(zip(PAGES, OWN, strict=True)))
    decode.transfer.close()


def test_what_a_read_uses_is_its_own(latent_format: str) -> None:
    """A graph keeps no tensor: what is freed under it is given to others, and each then writes into the other's."""
    device = torch.device("cuda", 0)
    source, target = (make_pools(make_layout(LAYERS, latent_format), NUM_PAGES, device) for _ in range(2))
    for layer in range(LAYERS):
        for number, store in enumerate(source.page_stores(layer)):
            store.copy_(contents(layer, number, store))
    lent, own = PoolPages(source), PoolPages(target).device
    assert own is not None
    others = [torch.full((64 * size,), -1, dtype=torch.int64, device=device) for size in [*range(1, 24)] * 40]
    torch.cuda.synchronize(device)
    expected = digests_of(lent, PAGES)
    for _ in range(20):  # more than there are slots
        assert own.fill([region.address for region in lent.regions], PAGES, OWN)() == expected
        assert own.digests(OWN) == expected
    assert all(bool((other == -1).all()) for other in others)
    for layer in range(LAYERS):
        for read, written in zip(source.page_stores(layer), target.page_stores(layer), strict=True):
            assert torch.equal(read[PAGES], written[OWN])
    # Reads beside each other keep their numbers apart, and more pages than a read may have are digested in several.
    started = [own.fill([region.address for region in lent.regions], [page], [page]) for page in PAGES]
    assert [wait() for wait in started] == [[digest] for digest in expected]
    many = PAGES * 100
    assert own.digests(many) == expected * 100


def test_no_garbage_is_collected_in_a_capture(latent_format: str) -> None:
    """What a collection frees on a device, other graphs above all, would break the capture."""
    pools = make_pools(make_layout(LAYERS, latent_format), NUM_PAGES, torch.device("cuda", 0))
    captures: list[bool] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            captures.append(torch.cuda.is_current_stream_capturing())

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        pages = PoolPages(pools).device
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert pages is not None
    assert captures
    assert not any(captures)
    assert gc.isenabled()
    assert pages.digests(PAGES) == digests_of(PoolPages(pools), PAGES)


def digests_of(pages: PoolPages, numbers: list[int]) -> list[int]:
    """By the reference, from the bytes."""
    size = pages.page_bytes
    data = bytearray(len(numbers) * size)
    pages.read(numbers, memoryview(data))
    stores, start = list[list[int]](), 0
    for region in pages.regions:
        stores.append([start, region.page_bytes])
        start += region.page_bytes
    found: list[int] = []
    for at in range(len(numbers)):
        memory = torch.frombuffer(data[at * size :][:size], dtype=torch.uint8)
        [digest] = page_digest(memory, torch.tensor(stores), torch.tensor([0])).tolist()
        found.append(digest % (1 << 64))
    return found


def test_memory_that_is_laid_out_otherwise_is_not_mapped(prefill: PrefillProcess, latent_format: str) -> None:
    other = make_pools(make_layout(LAYERS - 1, latent_format), NUM_PAGES, torch.device("cuda", 0))
    with pytest.raises(LoanError, match="laid out"):
        CudaIpc(PoolPages(other)).borrow(prefill.ask("lend"))
