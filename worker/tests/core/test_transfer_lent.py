"""Pages that are read out of lent memory: who lends to whom, and what a fault at any moment costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from baleen_worker.transfer import borrowing, wire
from baleen_worker.transfer.actions import Arrived, Begun, Failed, HandedOver, Stopped
from baleen_worker.transfer.lending import Backend, LoanError
from baleen_worker.transfer.messages import Computed, Final, Lend, Lent, Took
from baleen_worker.transfer.orders import Cancel, Finish, Offer, Open, Receive
from baleen_worker.transfer.reading import Reading
from lent_pages import NUM_PAGES, SharedPages
from test_transfer_tcp import DECODE, PREFILL, End, Forger, expect, hand_over, new_key, offer


@pytest.fixture
def prefill() -> Iterator[End]:
    end = End(PREFILL, listens=True, how="lent")
    yield end
    end.close()


@pytest.fixture
def decode() -> Iterator[End]:
    end = End(DECODE, listens=False, how="lent")
    yield end
    end.close()


def memory(end: End) -> SharedPages:
    assert isinstance(end.store, SharedPages)
    return end.store


def begin(prefill: End, decode: End, pages: list[int]) -> tuple[bytes, int]:
    """A leg that is announced, and not read yet."""
    key = new_key()
    offer(prefill, key, pages)
    expect(prefill, decode, key, len(pages))
    decode.wait_for(key, Begun)
    return key


def half_a_prompt(prefill: End, decode: End) -> tuple[bytes, int]:
    """A leg of four pages, of which two have come."""
    key = new_key()
    prefill.transfer.give([Open(key), Offer(key, 0, [1, 2], [1, 1])])
    expect(prefill, decode, key, 4)
    decode.wait_for(key, Begun)
    decode.transfer.give([Receive(key, 0, [40, 41, 42, 43])])
    decode.wait(lambda: decode.transfer.counters.num_pages_received == 2)
    return key


def failure(decode: End, key: tuple[bytes, int]) -> str:
    decode.wait_for(key, Failed)
    return next(report.reason for report in decode.told[key] if isinstance(report, Failed))


def test_legs_share_one_mapping_and_nothing_comes_over_the_connection(prefill: End, decode: End) -> None:
    def nothing(pages: Sequence[int], into: memoryview) -> None:
        del pages, into
        raise AssertionError("pages were sent")

    memory(prefill).read = nothing
    for _ in range(3):
        hand_over(prefill, decode)
    assert memory(decode).num_borrowed == 1
    assert prefill.transfer.counters.num_pages_sent == decode.transfer.counters.num_pages_received == 12


def test_pages_that_change_hands_while_they_are_copied_are_copied_again(prefill: End, decode: End) -> None:
    key = begin(prefill, decode, [1, 2])

    def grant(_: Sequence[int]) -> None:
        """To somebody else, in the middle of the copy."""
        memory(prefill).generations[2] = 2
        memory(decode).before_copy = lambda _: None

    memory(decode).before_copy = grant
    decode.transfer.give([Receive(key, 0, [40, 41])])
    prefill.wait(lambda: prefill.transfer.counters.num_stale_reads == 1)
    prefill.transfer.give([Offer(key, 0, [1, 2], [1, 2])])
    decode.wait_for(key, Arrived)
    assert decode.transfer.counters.num_pages_received == 2


def test_a_leg_is_over_when_nothing_is_copied_any_more(prefill: End, decode: End) -> None:
    """Else its pages would be granted to somebody else, and written once more."""
    key = begin(prefill, decode, [1, 2])
    copies, go_on = threading.Event(), threading.Event()

    def hold(_: Sequence[int]) -> None:
        copies.set()
        assert go_on.wait(20)

    memory(decode).before_copy = hold
    decode.transfer.give([Receive(key, 0, [40, 41])])
    assert copies.wait(20)
    decode.transfer.give([Cancel(key)])
    assert decode.probe("127.0.0.1:1") is not None  # carried out after the order before
    assert not any(isinstance(report, Stopped) for report in decode.told[key])
    go_on.set()
    decode.wait_for(key, Stopped)
    assert decode.transfer.counters.num_pages_received == 0


def test_what_comes_over_a_connection_is_not_overwritten_by_a_copy_that_was_begun_before(prefill: End) -> None:
    """The connection breaks in the middle of a copy, and memory is not lent again."""
    decode = End(DECODE, listens=False, how="lent", backend=Backend.AUTO)
    key = begin(prefill, decode, [1, 2])
    copies, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hold(theirs: object, pages: Sequence[int], ours: Sequence[int]) -> None:
        del theirs, pages
        copies.set()
        assert go_on.wait(20)
        for page in ours:
            memory(decode).spoil(page, bytes([99]) * 1000)
        done.set()

    memory(decode).copy_in = hold
    decode.transfer.give([Receive(key, 0, [40, 41])])
    assert copies.wait(20)
    sides: list[Any] = [prefill.transfer, decode.transfer]
    borrower = sides[1]._fetcher._borrower
    borrower._refusals.update(borrower._loans)
    [sending] = sides[0]._server._sending.values()
    sides[0]._station.post(sending.connection.shut)
    threading.Timer(0.5, go_on.set).start()  # long after the pages could have come another way
    decode.wait_for(key, Arrived)
    assert done.wait(20)
    assert [memory(decode).pages[page][0] for page in (40, 41)] == [1, 2]
    decode.close()


def test_the_end_of_a_peer_ends_the_leg_and_the_mapping(decode: End) -> None:
    prefill = End(PREFILL, listens=True, how="lent")
    hand_over(prefill, decode)
    key = begin(prefill, decode, [1, 2])
    assert memory(decode).num_borrowed == 1
    prefill.close()
    decode.transfer.give([Receive(key, 0, [40, 41])])
    assert "cannot be reached" in failure(decode, key)
    decode.wait(lambda: memory(decode).num_borrowed == 0)
    again = End(PREFILL, listens=True, how="lent")
    hand_over(again, decode)
    again.close()


def test_who_does_not_lend_is_refused_or_read_over_tcp(decode: End) -> None:
    prefill = End(PREFILL, listens=True, how="lent", reading=Reading())
    key = new_key()
    offer(prefill, key, [1, 2])
    expect(prefill, decode, key, 2)
    assert "start it with the same --disaggregation-transfer-backend" in failure(decode, key)
    assert "does not lend" in (decode.probe(prefill.transfer.address or "") or "")
    either = End(DECODE, listens=False, how="lent", backend=Backend.AUTO)
    hand_over(prefill, either)
    assert either.probe(prefill.transfer.address or "") is None
    assert memory(either).num_borrowed == 0
    either.close()
    prefill.close()


def test_memory_of_another_host_is_refused(prefill: End, decode: End, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["here", "there"])
    monkeypatch.setattr(borrowing, "host_name", lambda: next(names))
    key = new_key()
    offer(prefill, key, [1])
    expect(prefill, decode, key, 1)
    assert "another host" in failure(decode, key)


def test_memory_that_does_not_fit_is_refused(prefill: End, decode: End) -> None:
    memory(prefill).regions = memory(prefill).regions[:-1]
    key = new_key()
    offer(prefill, key, [1])
    expect(prefill, decode, key, 1)
    assert "laid out in another way" in failure(decode, key)


class SlowDigests:
    """Has a side digest nothing more until it is told to go on."""

    def __init__(self, end: End) -> None:
        self._go_on, self._digests = threading.Event(), memory(end).digests
        memory(end).digests = self._wait

    def go_on(self) -> None:
        self._go_on.set()

    def _wait(self, pages: Sequence[int]) -> list[int]:
        assert self._go_on.wait(20)
        return self._digests(pages)


def copies_of(decode: End) -> list[list[int]]:
    """What is copied from now on."""
    copied: list[list[int]] = []
    memory(decode).before_copy = lambda pages: copied.append([*pages])
    return copied


def test_pages_are_copied_while_their_owner_digests_them_and_only_once(prefill: End, decode: End) -> None:
    key = half_a_prompt(prefill, decode)
    copied, digests = copies_of(decode), SlowDigests(prefill)
    prefill.transfer.give([Offer(key, 2, [3, 4], [1, 1]), Finish(key, Final(5, 0, 4))])
    decode.wait(lambda: copied == [[3, 4]])
    assert decode.transfer.counters.num_pages_received == 2
    digests.go_on()
    decode.wait_for(key, Arrived)
    assert copied == [[3, 4]]
    assert [memory(decode).pages[page][0] for page in (40, 41, 42, 43)] == [1, 2, 3, 4]


def test_a_copy_that_began_early_proves_nothing(prefill: End, decode: End) -> None:
    key = half_a_prompt(prefill, decode)
    copied, digests = copies_of(decode), SlowDigests(prefill)
    prefill.transfer.give([Offer(key, 2, [3, 4], [1, 1])])
    decode.wait(lambda: copied == [[3, 4]])
    memory(prefill).spoil(4, bytes([99]) * 1000)  # after the copy, and before it is digested
    digests.go_on()
    prefill.transfer.give([Finish(key, Final(5, 0, 4))])
    decode.wait_for(key, Arrived)
    assert copied == [[3, 4], [3, 4]]
    assert decode.transfer.counters.num_damaged_reads == 1
    assert memory(decode).pages[43] == bytes([99]) * 1000


def test_the_way_to_lent_memory_is_kept_awake_while_a_leg_may_copy(
    prefill: End, decode: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link between two devices that has fallen asleep would cost the last chunk more than the owner's digests."""
    monkeypatch.setattr(borrowing, "_TOUCH_S", 0.001)
    keys = [half_a_prompt(prefill, decode) for _ in range(2)]
    transfer: Any = decode.transfer
    [borrowed] = transfer._borrower._loans.values()
    for key in keys:
        seen = memory(decode).num_touched
        decode.wait(lambda seen=seen: memory(decode).num_touched > seen + 2)
        prefill.transfer.give([Offer(key, 2, [3, 4], [1, 1]), Finish(key, Final(5, 0, 4))])
        decode.wait_for(key, Arrived)
    decode.wait(lambda: not borrowed.result().is_kept_awake)
    hand_over(prefill, decode)


def say(prefill: End, message: Computed) -> None:
    """To the peer of the only leg."""
    transfer: Any = prefill.transfer

    def send() -> None:
        [sending] = transfer._server._sending.values()
        sending.connection.send(message)

    transfer._station.post(send)


def test_what_is_here_is_not_copied_over(prefill: End, decode: End) -> None:
    """A peer says of pages that have come that they are computed, or of none, or of some that nobody asked for."""
    key = half_a_prompt(prefill, decode)
    copied = copies_of(decode)
    for first, pages in ((0, [7, 8]), (1, [7, 8]), (0, []), (4, [7]), (-1, [7])):
        say(prefill, Computed(first, pages, [1 for _ in pages]))
    prefill.transfer.give([Offer(key, 2, [3, 4], [1, 1]), Finish(key, Final(5, 0, 4))])
    decode.wait_for(key, Arrived)
    assert copied == [[3, 4]]
    assert [memory(decode).pages[page][0] for page in (40, 41, 42, 43)] == [1, 2, 3, 4]


def test_pages_outside_of_lent_memory_are_never_read(prefill: End, decode: End) -> None:
    memory(prefill).generations += [1]
    memory(prefill).digests = lambda pages: [0 for _ in pages]
    key = begin(prefill, decode, [1, NUM_PAGES])
    decode.transfer.give([Receive(key, 0, [40, 41])])
    assert "does not have" in failure(decode, key)
    assert memory(decode).pages[40] == bytes([40]) * 1000


def test_a_device_that_fails_fails_the_leg(prefill: End, decode: End) -> None:
    key = begin(prefill, decode, [1, 2])

    def fail(_: Sequence[int]) -> None:
        raise RuntimeError("an illegal address")

    memory(decode).before_copy = fail
    decode.transfer.give([Receive(key, 0, [40, 41])])
    assert "an illegal address" in failure(decode, key)


@pytest.mark.parametrize(
    ("took", "answer"),
    [
        (Took(0, [1, 2], [1, 1]), "Sealed"),
        (Took(0, [1, 2], [1, 2]), "Stale"),
        (Took(0, [2, 1], [1, 1]), "Stale"),
        (Took(0, [1, 99], [1, 1]), "Stale"),
        (Took(5, [1], [1]), "Stale"),
    ],
)
def test_only_what_is_held_is_sealed(prefill: End, decode: End, took: Took, answer: str) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    assert forger.read()  # the chunk
    assert forger.read()  # the final record
    forger.send(took)
    assert type(wire.decode_from_prefill(forger.read())).__name__ == answer
    hand_over(prefill, decode)


@pytest.mark.parametrize("took", [Took(0, [], []), Took(0, [1, 2], [1])])
def test_who_breaks_the_protocol_is_dropped(prefill: End, decode: End, took: Took) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    forger.send(took)
    assert forger.is_dropped()
    assert prefill.transfer.counters.num_dropped == 1
    hand_over(prefill, decode)


def test_memory_is_lent_to_nobody_who_was_not_greeted(prefill: End) -> None:
    forger = Forger(prefill)
    forger.send(Lend())
    assert not isinstance(wire.decode_from_prefill(forger.read()), Lent)
    assert forger.read() == b""
    known = Forger(prefill)
    known.respond()
    known.read()
    known.send(Lend())
    assert isinstance(wire.decode_from_prefill(known.read()), Lent)
    known.send(Took(0, [1], [1]))
    assert known.is_dropped()


def test_a_handover_is_told_to_both(prefill: End, decode: End) -> None:
    key = begin(prefill, decode, [5])
    decode.transfer.give([Receive(key, 0, [6])])
    decode.wait_for(key, Arrived)
    prefill.wait_for(key, HandedOver)
    assert memory(decode).pages[6] == bytes([5]) * 1000


def test_a_rank_without_a_gpu_lends_nothing() -> None:
    from baleen_worker.fake_pages import FakePages, FakePageStore
    from baleen_worker.transfer.cuda_ipc import CudaIpc

    with pytest.raises(LoanError, match="host memory"):
        CudaIpc(FakePageStore(FakePages(2)))
