"""What a prefill worker that lies, or a leg that is over, may not do: legs against a peer that speaks as it likes.

Every check that keeps a foreign or stale page out has a test here or in `test_transfer_tcp.py` that turns red without
it; `test_transfer_mutations.py` takes them out one by one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import Arrived, Begun, Failed, ProtocolError, Stopped, Timers
from baleen_worker.transfer.messages import Chunk, Data, Final, FromPrefill, Read, Response, Sealed, Stale, Want
from baleen_worker.transfer.orders import Cancel, Expect, Finish, Offer, Open, Peer, Receive, Withdraw
from baleen_worker.transfer.receiving import WINDOW, ReceivingLeg
from numpy.typing import NDArray
from test_transfer_tcp import DECODE, EPOCH, PAGE_BYTES, PREFILL, End, Forger, How, new_key, offer
from xxhash import xxh3_64_intdigest

PAGE = bytes(range(250)) * 4
DIGEST = xxh3_64_intdigest(PAGE)
assert len(PAGE) == PAGE_BYTES


class Impostor:
    """A prefill worker that knows the key and nothing else. It says what a test has it say, to one leg of one page."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(f"127.0.0.1:{self._server.getsockname()[1]}", EPOCH, 0)
        self._socket: socket.socket | None = None

    def accept(self) -> None:
        """Greets whoever comes, and hears what it wants."""
        self._socket = accepted = self._server.accept()[0]
        accepted.settimeout(20)
        said = wire.challenge(PREFILL)
        self.send(said)
        heard = wire.decode_from_decode(self._frame())
        assert isinstance(heard, Response)
        self.send(wire.welcome(PREFILL, said, heard))
        assert isinstance(wire.decode_from_decode(self._frame()), Want)

    def send(self, message: FromPrefill, data: bytes = b"") -> None:
        """A frame, and bytes after it."""
        assert self._socket is not None
        self._socket.sendall(wire.encode(message) + data)

    def send_bytes(self, data: bytes) -> None:
        """Bytes alone."""
        assert self._socket is not None
        self._socket.sendall(data)

    def hear(self) -> Any:
        """What the decode side says next."""
        return wire.decode_from_decode(self._frame())

    def is_left(self) -> bool:
        """Whether the decode side ends the connection, whatever it says before."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self._frame()
        return True

    def close(self) -> None:
        """Ends everything."""
        self._server.close()
        if self._socket is not None:
            self._socket.close()

    def _frame(self) -> bytes:
        return wire.opened(
            self._exactly(wire.DIGEST_BYTES + int.from_bytes(self._exactly(wire.LENGTH_BYTES), "little"))
        )

    def _exactly(self, count: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@pytest.fixture(params=["in place", "staged"])
def how(request: pytest.FixtureRequest) -> How:
    """Whether pages go between sockets and pools without a copy in between."""
    return request.param


@pytest.fixture
def decode(how: How) -> Iterator[End]:
    end = End(DECODE, listens=False, how=how, timers=Timers(20.0, 20.0))
    yield end
    end.transfer.close()


@pytest.fixture
def prefill(how: How) -> Iterator[End]:
    end = End(PREFILL, listens=True, how=how, timers=Timers(20.0, 20.0))
    yield end
    end.transfer.close()


@contextlib.contextmanager
def asked(decode: End) -> Generator[tuple[Impostor, tuple[bytes, int]]]:
    """A leg that has asked an impostor for its only page, which was announced as page 9 of generation 3."""
    impostor, key = Impostor(), new_key()
    try:
        decode.transfer.give([Expect(key, impostor.peer, 1, 0)])
        impostor.accept()
        impostor.send(Chunk(0, [9], [3], [DIGEST]))
        impostor.send(Final(5, 0, 1))
        decode.wait_for(key, Begun)
        decode.transfer.give([Receive(key, 0, [40])])
        assert impostor.hear() == Read(0, [9], [3])
        yield impostor, key
    finally:
        impostor.close()


def test_an_honest_answer_is_taken(decode: End) -> None:
    """Else the others would prove nothing."""
    with asked(decode) as (impostor, key):
        impostor.send(Data(0, PAGE_BYTES), PAGE)
        impostor.send(Sealed(0, [3]))
        decode.wait_for(key, Arrived)
        assert decode.store.pages[40] == PAGE


LIES: dict[str, Callable[[Impostor], None]] = {
    "too few bytes": lambda peer: peer.send(Data(0, PAGE_BYTES - 1), PAGE[:-1]),
    "too many bytes": lambda peer: peer.send(Data(0, 2 * PAGE_BYTES), PAGE + PAGE),
    "no bytes": lambda peer: (peer.send(Data(0, 0)), peer.send(Sealed(0, [3])))[-1],
    "an answer to nothing": lambda peer: peer.send(Data(7, PAGE_BYTES), PAGE),
    "a verdict on nothing": lambda peer: peer.send(Sealed(0, [3])),
    "a verdict on something else": lambda peer: (peer.send(Data(0, PAGE_BYTES), PAGE), peer.send(Sealed(1, [3])))[-1],
    "a word in between": lambda peer: (peer.send(Data(0, PAGE_BYTES), PAGE), peer.send(Final(5, 0, 1)))[-1],
    "a page that is not the prompt's": lambda peer: peer.send(Chunk(1, [9], [3], [DIGEST])),
    "pages without digests": lambda peer: peer.send(Chunk(0, [9], [3], [])),
    "a token that is none": lambda peer: peer.send(Final(100, 0, 1)),
    "another number of pages": lambda peer: peer.send(Final(5, 0, 2)),
    "a frame without end": lambda peer: peer.send_bytes((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little")),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_leg_and_nothing_else(decode: End, lie: str) -> None:
    with asked(decode) as (impostor, key):
        LIES[lie](impostor)
        decode.wait_for(key, Failed)
        assert impostor.is_left()
        assert decode.transfer.counters.num_dropped == 1
        assert decode.transfer.counters.num_pages_received == 0
    test_an_honest_answer_is_taken(decode)


@pytest.mark.parametrize(("page", "generation"), [(PAGE, 4), (PAGE[:-1] + b"x", 3)], ids=["generation", "bytes"])
def test_what_is_not_as_announced_is_read_again(decode: End, page: bytes, generation: int) -> None:
    """Another generation as well, though its bytes are right: what was copied is not what had been announced."""
    with asked(decode) as (impostor, key):
        impostor.send(Data(0, PAGE_BYTES), page)
        impostor.send(Sealed(0, [generation]))
        assert impostor.hear() == Read(0, [9], [3])
        assert decode.transfer.counters.num_pages_received == 0
        impostor.send(Data(0, PAGE_BYTES), PAGE)
        impostor.send(Sealed(0, [3]))
        decode.wait_for(key, Arrived)
        assert decode.store.pages[40] == PAGE


def test_void_bytes_are_announced_and_read_anew(decode: End) -> None:
    with asked(decode) as (impostor, key):
        impostor.send(Data(0, PAGE_BYTES), PAGE)
        impostor.send(Stale(0, 1))
        impostor.send(Chunk(0, [11], [8], [DIGEST]))
        assert impostor.hear() == Read(0, [11], [8])
        impostor.send(Data(0, PAGE_BYTES), PAGE)
        impostor.send(Sealed(0, [8]))
        decode.wait_for(key, Arrived)


def test_nothing_is_written_after_an_abort_was_answered(decode: End) -> None:
    """In the middle of a page: from `Stopped` on, the page may be somebody else's."""
    with asked(decode) as (impostor, key):
        impostor.send(Data(0, PAGE_BYTES), PAGE[:400])
        decode.transfer.give([Cancel(key)])
        decode.wait_for(key, Stopped)
        decode.store.spoil(40, bytes(PAGE_BYTES))
        with contextlib.suppress(OSError):  # it may be gone already
            impostor.send_bytes(PAGE[400:])
        assert impostor.is_left()
        assert decode.store.pages[40] == bytes(PAGE_BYTES)


# --- what a prefill worker does not serve -----------------------------------------------------------------------------


def test_pages_that_were_withdrawn_are_not_sent(prefill: End) -> None:
    """Though nobody else has been granted them yet."""
    key = new_key()
    prefill.transfer.give([Open(key), Offer(key, 0, [1, 2], [1, 1])])
    forger = Forger(prefill)
    forger.greet(key)
    assert wire.decode_from_prefill(forger.read()) == Chunk(0, [1, 2], [1, 1], digests_of(prefill, [1, 2]))
    prefill.transfer.give([Withdraw(key)])
    forger.send(Read(0, [1, 2], [1, 1]))
    assert wire.decode_from_prefill(forger.read()) == Stale(0, 2)
    prefill.transfer.give([Offer(key, 0, [2], [1])])
    assert wire.decode_from_prefill(forger.read()) == Chunk(0, [2], [1], digests_of(prefill, [2]))
    assert prefill.transfer.counters.num_pages_sent == 0


def test_a_leg_that_was_withdrawn_is_told_from_its_new_beginning(prefill: End) -> None:
    """A peer that comes now hears nothing of pages that are gone."""
    key = new_key()
    prefill.transfer.give([Open(key), Offer(key, 0, [1, 2], [1, 1]), Withdraw(key), Offer(key, 0, [3], [1])])
    forger = Forger(prefill)
    forger.greet(key)
    assert wire.decode_from_prefill(forger.read()) == Chunk(0, [3], [1], digests_of(prefill, [3]))


def test_a_leg_that_is_over_serves_nothing(prefill: End) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    assert forger.read()  # the chunk
    assert forger.read()  # the final record
    prefill.transfer.give([Cancel(key)])
    assert type(wire.decode_from_prefill(forger.read())).__name__ == "Refused"
    with contextlib.suppress(OSError):
        forger.send(Read(0, [1, 2], [1, 1]))
    assert forger.is_dropped()
    assert prefill.transfer.counters.num_pages_sent == 0


def test_a_page_that_changes_hands_while_it_is_sent_is_void(prefill: End, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    assert forger.read()  # the chunk
    assert forger.read()  # the final record
    asked_for = threading.Event()

    views = prefill.store.views

    def change(pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        prefill.store.generations[2] = 2
        asked_for.set()
        return views(pages)

    monkeypatch.setattr(prefill.store, "views", change)
    forger.send(Read(0, [1, 2], [1, 1]))
    assert wire.decode_from_prefill(forger.read()) == Data(0, 2 * PAGE_BYTES)
    forger.skip(2 * PAGE_BYTES)
    assert wire.decode_from_prefill(forger.read()) == Stale(0, 2)
    assert asked_for.is_set()
    assert prefill.transfer.counters.num_pages_sent == 0


def digests_of(end: End, pages: list[int]) -> list[int]:
    return [xxh3_64_intdigest(bytes(end.store.pages[page])) for page in pages]


# --- a cut -----------------------------------------------------------------------------------------------------------


def test_reads_do_not_outlive_their_connection() -> None:
    """Else they would fill the window for ever, and an answer on the next connection would be taken for theirs."""
    num_pages = WINDOW + 1
    leg = ReceivingLeg(
        (b"x", 0), Timers(), num_pages=num_pages, num_scored=0, vocab_size=10, pages_per_read=1, now_s=0.0
    )
    chunk = Chunk(0, [*range(num_pages)], [1] * num_pages, [7] * num_pages)
    leg.connected(0.0)
    leg.hear(chunk, 0.0)
    reads = leg.reserve(0, 0.0)
    assert len(reads) == WINDOW
    leg.lost("it was cut", 1.0)
    leg.connected(2.0)
    with pytest.raises(ProtocolError):
        leg.expected_pages(Data(0, 1))
    with pytest.raises(ProtocolError):
        leg.received(Sealed(0, [1]), [7], 2.0)
    assert leg.hear(chunk, 2.0) == reads


def test_finish_is_what_makes_an_acknowledgement_count(prefill: End) -> None:
    """An order for a leg that was cancelled changes nothing, whichever it is."""
    key = new_key()
    prefill.transfer.give([Open(key), Offer(key, 0, [1], [1]), Cancel(key), Finish(key, Final(5, 0, 1))])
    forger = Forger(prefill)
    forger.greet(key)
    assert type(wire.decode_from_prefill(forger.read())).__name__ == "Wait"
    assert key not in prefill.told
