"""Transfers over real sockets: strangers and forgers are dropped and counted, and nothing else changes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from baleen_worker.step import DevicePages, Region
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import Arrived, Begun, Failed, HandedOver, LeaseEnded, Report, Stopped, Timers
from baleen_worker.transfer.lending import Backend
from baleen_worker.transfer.messages import (
    Ack,
    Challenge,
    Final,
    FromDecode,
    FromPrefill,
    Key,
    Read,
    Response,
    Want,
)
from baleen_worker.transfer.orders import Cancel, Expect, Finish, LegNews, Offer, Open, Peer, Probe, ProbeEnded, Receive
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.tcp import TcpTransfer
from baleen_worker.transfer.wire import Identity, StrangerError
from lent_pages import SharedPages
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

PAGE_BYTES = 1000
STORES = (slice(10), slice(10, 700), slice(700, PAGE_BYTES))
LAYOUT = "pages=plain"
SECRET = b"a secret of both sides"
EPOCH = 77
PREFILL = Identity(LAYOUT, EPOCH, SECRET)
DECODE = Identity(LAYOUT, 78, SECRET)


How = Literal["in place", "staged", "lent"]


class Bytes:
    """Pages in memory."""

    page_bytes = PAGE_BYTES
    num_pages = 64
    regions: Sequence[Region] = ()
    device: DevicePages | None = None

    def __init__(self, *, in_place: bool) -> None:
        self.pages = [bytearray([number]) * PAGE_BYTES for number in range(64)]
        self.generations = [1] * 64
        self.in_place = in_place

    def spoil(self, page: int, data: bytes) -> None:
        """Somebody writes the page."""
        self.pages[page][:] = data

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        wholes = [np.frombuffer(self.pages[page], np.uint8)[None] for page in pages if self.in_place]
        return [whole[:, store] for store in STORES for whole in wholes]

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        into[:] = b"".join(self.pages[page] for page in pages)

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        for at, page in enumerate(pages):
            self.pages[page][:] = data[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]


class End:
    """One rank's transfer, and what it has told of each leg."""

    def __init__(
        self,
        identity: Identity,
        *,
        listens: bool,
        how: How = "staged",
        timers: Timers = Timers(2.0, 3.0),  # noqa: B008
        backend: Backend = Backend.CUDA_IPC,
        reading: Reading | None = None,
    ) -> None:
        self.store = SharedPages() if how == "lent" else Bytes(in_place=how == "in place")
        lent = Reading(backend, self.store) if isinstance(self.store, SharedPages) else Reading()
        self.reading = reading or lent
        self.transfer = TcpTransfer(
            self.store,
            self.store.generations.__getitem__,
            identity,
            timers,
            vocab_size=100,
            listen=("127.0.0.1", 0) if listens else None,
            reading=self.reading,
        )
        self.told: dict[Key, list[Report]] = {}
        self.tried: dict[int, ProbeEnded] = {}

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while True:
            for news in self.transfer.take():
                if isinstance(news, LegNews):
                    self.told.setdefault(news.key, []).append(news.report)
                else:
                    self.tried[news.ticket] = news
            if condition():
                return
            assert time.monotonic() < deadline_s, f"still waiting; told so far: {self.told}"
            self.transfer.wait(0.05)

    def probe(self, address: str, epoch: int = EPOCH, rank: int = 0) -> str | None:
        """Tries a peer; returns why it failed."""
        ticket = len(self.tried)
        self.transfer.give([Probe(ticket, Peer(address, epoch, rank))])
        self.wait(lambda: ticket in self.tried)
        return self.tried[ticket].failure

    def close(self) -> None:
        self.transfer.close()
        if isinstance(self.store, SharedPages):
            assert self.store.num_borrowed == 0, "memory is still mapped"
            self.store.close()

    def wait_for(self, key: Key, kind: type[Report]) -> None:
        self.wait(lambda: any(isinstance(report, kind) for report in self.told.get(key, [])))


@pytest.fixture(params=["in place", "staged", "lent"])
def how(request: pytest.FixtureRequest) -> How:
    """Pages go between sockets and pools without a copy in between, or with one, or are read from lent memory."""
    return request.param


@pytest.fixture
def prefill(how: How) -> Iterator[End]:
    end = End(PREFILL, listens=True, how=how)
    yield end
    end.close()


@pytest.fixture
def decode(how: How) -> Iterator[End]:
    end = End(DECODE, listens=False, how=how)
    yield end
    end.close()


_numbers = itertools.count()


def new_key() -> Key:
    return next(_numbers).to_bytes(16, "big"), 0


def offer(prefill: End, key: Key, pages: list[int]) -> None:
    """A prompt that is computed and held."""
    generations = [prefill.store.generations[page] for page in pages]
    final = Finish(key, Final(5, 0, len(pages)))
    prefill.transfer.give([Open(key), Offer(key, 0, pages, generations), final])


def expect(prefill: End, decode: End, key: Key, num_pages: int, *, epoch: int = EPOCH, rank: int = 0) -> None:
    assert prefill.transfer.address is not None
    decode.transfer.give([Expect(key, Peer(prefill.transfer.address, epoch, rank), num_pages, 0)])


def hand_over(prefill: End, decode: End) -> None:
    """A leg from its beginning to its end; what all that goes wrong around it must not disturb."""
    key = new_key()
    expect(prefill, decode, key, 5)
    offer(prefill, key, [3, 4, 9, 8, 20])
    decode.wait_for(key, Begun)
    decode.transfer.give([Receive(key, 1, [40, 41, 42, 43])])
    decode.wait_for(key, Arrived)
    prefill.wait_for(key, HandedOver)
    assert [decode.store.pages[page][0] for page in (40, 41, 42, 43)] == [4, 9, 8, 20]


_forgers: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _close_forgers() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    while _forgers:
        _forgers.pop().close()


class Rank(Protocol):
    """Whoever has a transfer."""

    @property
    def transfer(self) -> TcpTransfer: ...


class Forger:
    """A peer that speaks the protocol as it likes."""

    def __init__(self, prefill: Rank, identity: Identity = DECODE) -> None:
        assert prefill.transfer.address is not None
        host, _, port = prefill.transfer.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        _forgers.append(self.socket)
        self.identity = identity

    def send(self, message: FromDecode | FromPrefill) -> None:
        self.socket.sendall(wire.encode(message))

    def read(self) -> bytes:
        """A frame, or nothing at the end."""
        head = self._exactly(4)
        return wire.opened(self._exactly(8 + int.from_bytes(head, "little"))) if head else b""

    def skip(self, count: int) -> None:
        """Reads bytes that follow a frame."""
        assert len(self._exactly(count)) == count

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except ConnectionError:
                return b""
            if not part:
                return b""
            data += part
        return data

    def respond(self, **changes: Any) -> None:
        """Answers the challenge, perhaps not as it should."""
        heard = wire.decode_from_prefill(self.read())
        assert isinstance(heard, Challenge)
        said = wire.respond(self.identity, heard, boot_epoch=EPOCH, dp_rank=0)
        fields: dict[str, Any] = {name: getattr(said, name) for name in said.__struct_fields__} | changes
        self.send(Response(**fields))

    def greet(self, key: Key) -> None:
        self.respond()
        self.read()
        self.send(Want(*key))

    def is_dropped(self) -> bool:
        """Whether the connection ends, whatever comes before that."""
        while self.read():
            pass
        return True


def sealed(body: bytes) -> bytes:
    """A frame with these bytes in it."""
    return len(body).to_bytes(4, "little") + xxh3_64_intdigest(body).to_bytes(8, "little") + body


def damaged(frame: bytes) -> bytes:
    """The frame with one bit of its last byte changed."""
    return frame[:-1] + bytes([frame[-1] ^ 1])


FORGED: dict[str, Callable[[Forger], None]] = {
    "nonsense": lambda forger: forger.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "an oversized frame": lambda forger: forger.socket.sendall((1 << 31).to_bytes(4, "little")),
    "an empty frame": lambda forger: forger.socket.sendall(bytes(4)),
    "another record": lambda forger: forger.send(Want(b"x", 0)),
    "a pickle": lambda forger: forger.socket.sendall(sealed(b"\x80\x04K\x01.\x00\x00\x00")),
    "a damaged frame": lambda forger: forger.socket.sendall(damaged(wire.encode(Want(b"x", 0)))),
    "a wrong version": lambda forger: forger.respond(version=1),
    "a wrong layout": lambda forger: forger.respond(layout_id="pages=other"),
    "a wrong rank": lambda forger: forger.respond(dp_rank=1),
    "a wrong proof": lambda forger: forger.respond(proof=bytes(32)),
    "a short nonce": lambda forger: forger.respond(nonce=b"x"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_stranger_is_dropped_and_counted(prefill: End, decode: End, what: str) -> None:
    forger = Forger(prefill)
    FORGED[what](forger)
    assert forger.is_dropped()
    assert prefill.transfer.counters.num_dropped == 1
    hand_over(prefill, decode)


def test_who_does_not_know_the_secret_learns_nothing_and_teaches_nothing(prefill: End, decode: End) -> None:
    forger = Forger(prefill, replace(DECODE, secret=b"another secret, guessed"))
    forger.respond()
    assert forger.is_dropped()
    stranger = End(replace(DECODE, secret=b""), listens=False)
    key = new_key()
    offer(prefill, key, [1, 2])
    expect(prefill, stranger, key, 2)
    stranger.wait_for(key, Failed)
    stranger.transfer.close()
    assert prefill.transfer.counters.num_dropped == 3  # the stranger believes the second refusal
    hand_over(prefill, decode)


def test_a_greeting_that_was_overheard_is_worth_nothing(prefill: End, decode: End) -> None:
    """The nonce of each connection is new, so a proof holds for one."""
    first, second = Forger(prefill), Forger(prefill)
    heard = wire.decode_from_prefill(first.read())
    assert isinstance(heard, Challenge)
    second.read()
    second.send(wire.respond(DECODE, heard, boot_epoch=EPOCH, dp_rank=0))
    assert second.is_dropped()
    hand_over(prefill, decode)


@pytest.mark.parametrize(
    "ask",
    [
        Read(0, [1, 2], [1, 2]),  # another generation
        Read(0, [2, 1], [1, 1]),  # other places
        Read(7, [1], [1]),
        Read(-1, [1], [1]),
        Read(0, [30], [1]),  # a page of somebody else
    ],
)
def test_nothing_is_read_that_was_not_announced(prefill: End, decode: End, ask: Read) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    told = forger.read() + forger.read()  # the chunk, the final record
    assert told
    forger.send(ask)
    assert type(wire.decode_from_prefill(forger.read())).__name__ == "Stale"
    assert prefill.transfer.counters.num_pages_sent == 0
    hand_over(prefill, decode)


@pytest.mark.parametrize("ask", [Read(0, [], []), Read(0, [1, 2], [1]), Want(b"x", 0)])
def test_a_peer_that_breaks_the_protocol_is_dropped(prefill: End, decode: End, ask: FromDecode) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    forger = Forger(prefill)
    forger.greet(key)
    forger.send(ask)
    assert forger.is_dropped()
    assert prefill.transfer.counters.num_dropped == 1
    expect(prefill, decode, key, 2)  # the leg is still to be had
    decode.wait_for(key, Begun)
    decode.transfer.give([Receive(key, 0, [40, 41])])
    decode.wait_for(key, Arrived)


def test_an_acknowledgement_before_the_end_is_no_handover(prefill: End, decode: End) -> None:
    key = new_key()
    prefill.transfer.give([Open(key), Offer(key, 0, [1], [1])])
    forger = Forger(prefill)
    forger.greet(key)
    forger.send(Ack())
    assert forger.is_dropped()
    prefill.wait(lambda: prefill.transfer.counters.num_dropped == 1)
    assert key not in prefill.told
    hand_over(prefill, decode)


def test_a_peer_that_never_reads_is_cut_off(prefill: End, decode: End) -> None:
    key = new_key()
    pages = list(range(1, 61))
    offer(prefill, key, pages)
    forger = Forger(prefill)
    forger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    forger.greet(key)
    with_generations = Read(0, pages, [1] * 60)
    try:
        for _ in range(100_000):
            forger.send(with_generations)
    except OSError:  # it is dropped, or it blocks both ways until it is
        pass
    hand_over(prefill, decode)
    prefill.wait_for(key, LeaseEnded)


def test_a_leg_that_never_comes_is_refused_in_time(prefill: End, decode: End) -> None:
    key = new_key()
    expect(prefill, decode, key, 2)
    decode.wait_for(key, Failed)
    assert prefill.transfer.counters.num_dropped == 1
    hand_over(prefill, decode)


def test_nobody_comes(prefill: End) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    prefill.wait_for(key, LeaseEnded)


def test_a_page_that_changes_hands_is_noticed_and_read_again(prefill: End, decode: End) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    prefill.store.generations[2] += 1
    expect(prefill, decode, key, 2)
    decode.wait_for(key, Begun)
    decode.transfer.give([Receive(key, 0, [40, 41])])
    prefill.wait(lambda: prefill.transfer.counters.num_stale_reads == 1)
    prefill.transfer.give([Offer(key, 0, [1, 2], [1, 2])])
    decode.wait_for(key, Arrived)


def test_a_page_that_changes_unseen_is_not_stored(how: How, prefill: End, decode: End) -> None:
    """As if bytes were damaged on the way: the digest tells, again and again, until the leg fails."""
    key = new_key()
    offer(prefill, key, [1, 2])
    expect(prefill, decode, key, 2)
    decode.wait_for(key, Begun)
    before = bytes(decode.store.pages[41])
    prefill.store.spoil(2, os.urandom(PAGE_BYTES))
    decode.transfer.give([Receive(key, 0, [40, 41])])
    decode.wait_for(key, Failed)
    assert decode.transfer.counters.num_damaged_reads > 1
    assert decode.transfer.counters.num_pages_received == 0
    assert how != "staged" or decode.store.pages[41] == before
    hand_over(prefill, decode)


def test_an_abort_says_when_nothing_is_stored_any_more(prefill: End, decode: End) -> None:
    key = new_key()
    offer(prefill, key, [1, 2])
    expect(prefill, decode, key, 2)
    decode.wait_for(key, Begun)
    decode.transfer.give([Receive(key, 0, [40, 41]), Cancel(key)])
    decode.wait_for(key, Stopped)
    kept = bytes(decode.store.pages[40])
    hand_over(prefill, decode)
    assert decode.store.pages[40] in (kept, bytes([4]) * PAGE_BYTES)


def test_a_trial_moves_a_page_that_is_nobodys(prefill: End, decode: End) -> None:
    assert prefill.transfer.address is not None
    prefill.store.spoil(0, os.urandom(PAGE_BYTES))
    others = [bytes(page) for page in decode.store.pages[1:]]
    assert decode.probe(prefill.transfer.address) is None
    assert decode.store.pages == [prefill.store.pages[0], *others]
    assert prefill.transfer.counters.num_pages_sent == decode.transfer.counters.num_pages_received == 0


def test_a_trial_says_what_would_fail_a_request(prefill: End, decode: End) -> None:
    address = prefill.transfer.address
    assert address is not None
    before = [bytes(page) for page in decode.store.pages]
    failures = [decode.probe(address, EPOCH + 1), decode.probe(address, rank=1)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
        failures.append(decode.probe(nowhere))
    failures.append(decode.probe(nowhere))
    with damaging(address) as damaged:
        failures.append(decode.probe(damaged))
    assert failures == [
        "the worker there has been started anew",
        "it does not accept this worker: its log says why",
        "it does not answer",
        "it cannot be reached (Connection refused)",
        "pages come damaged",
    ]
    assert decode.store.pages == before
    assert decode.probe(address) is None
    hand_over(prefill, decode)


def test_a_greeting_that_is_damaged_on_its_way_is_said_again(prefill: End, decode: End) -> None:
    assert prefill.transfer.address is not None
    key = new_key()
    with damaging(prefill.transfer.address, least_bytes=1, there=True) as damaged:
        decode.transfer.give([Expect(key, Peer(damaged, EPOCH, 0), 2, 0)])
        offer(prefill, key, [3, 4])
        decode.wait_for(key, Begun)
        decode.transfer.give([Receive(key, 0, [40, 41])])
        decode.wait_for(key, Arrived)
        prefill.wait_for(key, HandedOver)
    assert prefill.transfer.counters.num_dropped == 1
    assert [decode.store.pages[page][0] for page in (40, 41)] == [3, 4]


@contextlib.contextmanager
def damaging(address: str, *, least_bytes: int = PAGE_BYTES, there: bool = False) -> Generator[str]:
    """The way to a prefill worker: the last byte of what comes back on its first connection, or goes there, is changed,
    in pieces of at least so many bytes."""
    host, _, port = address.rpartition(":")

    def carry(source: socket.socket, target: socket.socket, spoils: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                whole = spoils and len(data) >= least_bytes
                target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if whole else data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def join(near: socket.socket, is_first: bool) -> None:
        with near, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=carry, args=(far, near, is_first and not there))
            back.start()
            carry(near, far, is_first and there)
            back.join()

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                near, _ = server.accept()
                # Some connections outlive the test: those that lend memory.
                threading.Thread(target=join, args=(near, number == 0), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_greetings_refuse_what_differs() -> None:
    challenge = wire.challenge(PREFILL)
    with pytest.raises(StrangerError, match="started anew"):
        wire.respond(DECODE, challenge, boot_epoch=EPOCH + 1, dp_rank=0)
    with pytest.raises(StrangerError, match="laid out"):
        wire.respond(replace(DECODE, layout_id="x"), challenge, boot_epoch=EPOCH, dp_rank=0)
    response = wire.respond(DECODE, challenge, boot_epoch=EPOCH, dp_rank=0)
    impostor = wire.welcome(replace(PREFILL, secret=SECRET), challenge, response)
    wire.check_welcome(DECODE, challenge, response, impostor)
    with pytest.raises(StrangerError, match="key"):
        wire.check_welcome(replace(DECODE, secret=b"x"), challenge, response, impostor)
