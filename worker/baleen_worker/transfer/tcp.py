"""Transfers over TCP: a thread with an event loop of its own, one connection a leg. Owns the sockets.

What is said and when is decided in `state.py`, who may say it in `wire.py`; pages are read and written through a
`PageStore`. The prefill side serves reads of pages that its leg has announced and looks at their generations after the
copy; the decode side receives into staging memory and stores what its leg has verified. The engine gives orders and
takes news without waiting.

Staging buffers are few and are lent for one read at a time, so memory is bounded whatever peers do; one that does not
take its data in time is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_intdigest

from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import (
    Action,
    Close,
    Connect,
    Failed,
    HandedOver,
    ProtocolError,
    Report,
    Send,
    Serve,
    Store,
    Timers,
)
from baleen_worker.transfer.connection import Buffers, Connection, bind, connect
from baleen_worker.transfer.messages import (
    Challenge,
    Chunk,
    Data,
    FromPrefill,
    Key,
    Read,
    Refused,
    Released,
    Response,
    Scores,
    Stale,
    Wait,
    Want,
    Welcome,
)
from baleen_worker.transfer.orders import (
    Cancel,
    Expect,
    Finish,
    LegNews,
    Offer,
    Open,
    Order,
    Receive,
    Score,
    Withdraw,
)
from baleen_worker.transfer.receiving import ReceivingLeg
from baleen_worker.transfer.sending import SendingLeg
from baleen_worker.transfer.wire import Identity, StrangerError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from baleen_worker.output import Load
    from baleen_worker.step import PageStore

# Bytes that one read asks for, unless a page is larger.
_READ_BYTES = 4 << 20
_GREETING_S = 5.0
_TICK_S = 0.2
_MAX_CONNECTIONS = 2048
_MAX_REMEMBERED = 4096
_MAX_COMPLAINTS = 256
# Log-probabilities of so many prompt tokens fit a frame, with all their alternatives.
_SCORES_PER_FRAME = 4096

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Since the start. `num_dropped`: connections of strangers, and of peers that break the protocol."""

    num_pages_sent: int = 0
    num_pages_received: int = 0
    num_stale_reads: int = 0
    num_failed: int = 0
    num_dropped: int = 0


@dataclass(slots=True)
class _Sending:
    leg: SendingLeg
    connection: Connection | None = None


@dataclass(slots=True)
class _Receiving:
    """`pages` are reserved for places from `first` on."""

    leg: ReceivingLeg
    expect: Expect
    task: asyncio.Task[None] | None = None
    connection: Connection | None = None
    first: int = 0
    pages: Sequence[int] = ()


class TcpTransfer:
    """All legs of one rank. Orders come from and news goes to one other thread, the engine's."""

    def __init__(
        self,
        store: PageStore,
        generation: Callable[[int], int],
        identity: Identity,
        timers: Timers,
        *,
        vocab_size: int,
        listen: tuple[str, int] | None,
        inbox: Sequence[int] = (),
    ) -> None:
        """`generation` says how often a page was granted; asked from this thread. `wait` looks at files of `inbox` too.

        `listen`: where to serve pages, port 0 for a free one; None: nowhere. Raises OSError when that is taken.
        """
        self._store = store
        self._generation = generation
        self._identity = identity
        self._timers = timers
        self._vocab_size = vocab_size
        self._pages_per_read = max(_READ_BYTES // store.page_bytes, 1)
        self.counters = Counters()
        self._news: deque[LegNews] = deque()
        self._sending: dict[Key, _Sending] = {}
        self._receiving: dict[Key, _Receiving] = {}
        self._handed_over: OrderedDict[Key, None] = OrderedDict()
        self._early: dict[Key, Connection] = {}  # peers of legs that have not come yet
        self._num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints: set[str] = set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = select.poll()
        for file in (self._wake_read, *inbox):
            self._poller.register(file, select.POLLIN)
        listener = None
        self.address: str | None = None
        if listen is not None:
            listener, self.address = bind(*listen)
        self._loop = asyncio.new_event_loop()
        self._buffers = Buffers(self._pages_per_read * store.page_bytes)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="transfer", daemon=True)
        self._thread.start()

    # --- the engine's side ------------------------------------------------------------------------------------------

    def give(self, orders: Sequence[Order]) -> None:
        """Orders are carried out in order."""
        if orders:
            self._loop.call_soon_threadsafe(self._take_orders, list(orders))

    def take(self) -> list[LegNews]:
        """News since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        news: list[LegNews] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def account(self, load: Load) -> Load:
        """The load with this transfer's counters filled in."""
        counters = self.counters
        return msgspec.structs.replace(
            load,
            sent_pages=counters.num_pages_sent,
            received_pages=counters.num_pages_received,
            stale_reads=counters.num_stale_reads,
            failed_transfers=counters.num_failed,
            dropped_peers=counters.num_dropped,
        )

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there is news or something to read from the sockets, or the time is over."""
        self._poller.poll(1000 * timeout_s)

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self, listener: socket.socket | None) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._keep_time())
        if listener is not None:
            self._spawn(self._accept(listener))
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if listener is not None:
            listener.close()
        self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a transfer fails", exc_info=error)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for key, sending in list(self._sending.items()):
                self._act_sending(key, sending, sending.leg.tick(now_s))
            for key, receiving in list(self._receiving.items()):
                self._act_receiving(key, receiving, receiving.leg.tick(now_s))
            for key, connection in list(self._early.items()):
                if now_s - connection.since_s > self._timers.lease_s:
                    self._complain(connection, "it wants a leg that never came")
                    del self._early[key]
                    connection.send(Refused("no such request has come here"))
                    connection.finish()
                else:
                    connection.send(Wait())

    def _tell(self, key: Key, report: Report) -> None:
        self._news.append(LegNews(key, report))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _complain(self, connection: Connection | None, reason: str) -> None:
        """Counts a peer that is dropped, and logs each reason once."""
        self.counters.num_dropped += 1
        if reason not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(reason)
            logger.warning("a peer at %s is dropped: %s", "?" if connection is None else connection.name, reason)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _take_orders(self, orders: Sequence[Order]) -> None:
        now_s = time.monotonic()
        for order in orders:
            match order:
                case Expect():
                    self._expect(order, now_s)
                case Receive(key, first, pages):
                    receiving = self._receiving.get(key)
                    if receiving is not None:
                        receiving.first, receiving.pages = first, pages
                        self._act_receiving(key, receiving, receiving.leg.reserve(first, now_s))
                case Cancel(key):
                    self._cancel(key)
                case Open(key):
                    self._sending[key] = _Sending(SendingLeg(self._timers))
                    if (early := self._early.pop(key, None)) is not None:
                        self._attach(key, early)
                case _:
                    sending = self._sending.get(order.key)
                    if sending is not None:
                        self._act_sending(order.key, sending, self._take_offer(sending.leg, order, now_s))

    def _expect(self, order: Expect, now_s: float) -> None:
        leg = ReceivingLeg(
            order.key,
            self._timers,
            num_pages=order.num_pages,
            num_scored=order.num_scored,
            vocab_size=self._vocab_size,
            pages_per_read=self._pages_per_read,
            now_s=now_s,
        )
        receiving = self._receiving[order.key] = _Receiving(leg, order)
        self._act_receiving(order.key, receiving, leg.start())

    def _take_offer(self, leg: SendingLeg, order: Offer | Score | Finish | Withdraw, now_s: float) -> Sequence[Action]:
        match order:
            case Offer(_, first, pages, generations):
                return leg.announce(Chunk(first, [*pages], [*generations], self._digests(pages)), now_s)
            case Score(_, first, logprobs):
                actions: list[Action] = []
                for start in range(0, len(logprobs.token_ids), _SCORES_PER_FRAME):
                    piece = logprobs.part(start, start + _SCORES_PER_FRAME)
                    actions += leg.score(Scores(first + start, piece), now_s)
                return actions
            case Finish(_, final):
                return leg.finish(final, now_s)
            case Withdraw():
                return leg.withdraw()

    def _digests(self, pages: Sequence[int]) -> list[int]:
        """XXH3_64 of each page's bytes."""
        size, digests = self._store.page_bytes, list[int]()
        buffer = self._buffers.own
        for start in range(0, len(pages), self._pages_per_read):
            part = pages[start : start + self._pages_per_read]
            self._store.read(part, buffer[: len(part) * size])
            digests += _digests_of(buffer, len(part), size)
        return digests

    def _cancel(self, key: Key) -> None:
        sending = self._sending.get(key)
        if sending is not None:
            self._act_sending(key, sending, sending.leg.cancel("the prefill leg is over"))
            self._sending.pop(key, None)
        receiving = self._receiving.get(key)
        if receiving is not None:
            self._act_receiving(key, receiving, receiving.leg.cancel())

    # --- serving ----------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            accepted, peer = await self._loop.sock_accept(listener)
            connection = Connection(self._loop, accepted, f"{peer[0]}:{peer[1]}", self._timers.progress_s)
            if self._num_connections >= _MAX_CONNECTIONS:
                self._complain(connection, "there are too many connections")
                accepted.close()
                continue
            self._spawn(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        self._num_connections += 1
        try:
            async with asyncio.timeout(_GREETING_S):
                await self._greet(connection)
                want = wire.decode_from_decode(await connection.receive(wire.MAX_GREETING_BYTES))
            if not isinstance(want, Want):
                raise ProtocolError("it does not say what it wants")
            await self._serve_leg((want.request_id, want.attempt), connection)
        except (StrangerError, ProtocolError) as error:
            self._complain(connection, str(error))
        except TimeoutError:
            self._complain(connection, "it does not introduce itself")
        except (OSError, EOFError):
            pass  # it is gone, and may come again
        finally:
            self._num_connections -= 1
            connection.socket.close()

    async def _greet(self, connection: Connection) -> None:
        said = wire.challenge(self._identity)
        await connection.write(wire.encode(said))
        heard = wire.decode_from_decode(await connection.receive(wire.MAX_GREETING_BYTES))
        if not isinstance(heard, Response):
            raise StrangerError("it does not answer the challenge")
        await connection.write(wire.encode(wire.welcome(self._identity, said, heard)))

    async def _serve_leg(self, key: Key, connection: Connection) -> None:
        if key in self._early:
            raise ProtocolError("another connection wants the same leg")
        writer = self._spawn(connection.write_queued(self._buffers))
        try:
            if key in self._sending:
                self._attach(key, connection)
            elif key in self._handed_over:
                connection.send(Released())
            else:
                self._early[key] = connection
            while True:
                message = wire.decode_from_decode(await connection.receive(wire.MAX_FRAME_BYTES))
                sending = self._sending.get(key)
                if sending is not None and sending.connection is connection:
                    self._act_sending(key, sending, sending.leg.hear(message, time.monotonic()))
        finally:
            if self._early.get(key) is connection:
                del self._early[key]
            sending = self._sending.get(key)
            if sending is not None and sending.connection is connection:
                sending.connection = None
                sending.leg.detach()
            writer.cancel()

    def _attach(self, key: Key, connection: Connection) -> None:
        sending = self._sending[key]
        if sending.connection is not None:
            sending.connection.shut()
        sending.connection = connection
        self._act_sending(key, sending, sending.leg.attach(time.monotonic()))

    def _act_sending(self, key: Key, sending: _Sending, actions: Sequence[Action]) -> None:
        connection = sending.connection
        for action in actions:
            match action:
                case Send(message):
                    if connection is not None:
                        connection.send(message)
                case Serve(read):
                    if connection is not None:
                        self._serve_read(sending.leg, read, connection)
                case Close():
                    if connection is not None:
                        connection.finish()
                case Connect() | Store():
                    raise AssertionError(f"a prefill leg wants to {type(action).__name__}")
                case _:
                    if isinstance(action, HandedOver):
                        self._remember(key)
                    self._sending.pop(key, None)
                    self._tell(key, action)

    def _remember(self, key: Key) -> None:
        """A peer whose acknowledgement was answered in vain may ask again."""
        self._handed_over[key] = None
        if len(self._handed_over) > _MAX_REMEMBERED:
            self._handed_over.popitem(last=False)

    def _serve_read(self, leg: SendingLeg, read: Read, connection: Connection) -> None:
        num_bytes = len(read.pages) * self._store.page_bytes
        if len(read.pages) > self._pages_per_read:
            raise ProtocolError(f"it reads more than {self._pages_per_read} pages at once")

        def copy_out(buffer: memoryview) -> tuple[FromPrefill, memoryview | None]:
            self._store.read(read.pages, buffer[:num_bytes])
            after = [self._generation(page) for page in read.pages]
            answer = leg.copied(read, after, num_bytes, time.monotonic())
            if isinstance(answer, Stale):
                self.counters.num_stale_reads += 1
                return answer, None
            self.counters.num_pages_sent += len(read.pages)
            return answer, buffer[:num_bytes]

        connection.send_pages(copy_out)

    # --- fetching ---------------------------------------------------------------------------------------------------

    async def _fetch(self, key: Key, receiving: _Receiving, delay_s: float) -> None:
        """One connection of a decode leg, from its making to its end."""
        await asyncio.sleep(delay_s)
        leg = receiving.leg
        try:
            reason = await self._talk(key, receiving)
        except (StrangerError, ProtocolError) as error:
            if not leg.over:
                self._complain(receiving.connection, str(error))
                self._act_receiving(key, receiving, leg.rejected(str(error)))
            reason = str(error)
        except TimeoutError:
            reason = "it does not answer"
        except OSError as error:
            reason = f"it cannot be reached ({error.strerror or error})"
        finally:
            if receiving.connection is not None:
                receiving.connection.socket.close()
                receiving.connection = None
        if not leg.over:
            self._act_receiving(key, receiving, leg.lost(reason, time.monotonic()))

    async def _talk(self, key: Key, receiving: _Receiving) -> str:
        """Until the connection or the leg ends; returns why."""
        leg, expect = receiving.leg, receiving.expect
        async with asyncio.timeout(_GREETING_S):
            connection = receiving.connection = await connect(self._loop, expect.address, self._timers.progress_s)
            await self._introduce(connection, expect)
        writer = self._spawn(connection.write_queued(self._buffers))
        try:
            self._act_receiving(key, receiving, leg.connected(time.monotonic()))
            while not leg.over:
                message = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
                if isinstance(message, Data):
                    await self._take_pages(key, receiving, connection, message)
                elif not leg.over:
                    self._act_receiving(key, receiving, leg.hear(message, time.monotonic()))
        except EOFError:
            pass
        finally:
            writer.cancel()
        return "its connection has ended"

    async def _introduce(self, connection: Connection, expect: Expect) -> None:
        heard = wire.decode_from_prefill(await connection.receive(wire.MAX_GREETING_BYTES))
        if not isinstance(heard, Challenge):
            raise StrangerError("it does not say what it is")
        said = wire.respond(self._identity, heard, boot_epoch=expect.boot_epoch, dp_rank=expect.dp_rank)
        await connection.write(wire.encode(said))
        try:
            answer = wire.decode_from_prefill(await connection.receive(wire.MAX_GREETING_BYTES))
        except EOFError:
            raise StrangerError("it does not accept this worker: its log says why") from None
        if not isinstance(answer, Welcome):
            raise StrangerError("it does not prove that it knows the key")
        wire.check_welcome(self._identity, heard, said, answer)

    async def _take_pages(self, key: Key, receiving: _Receiving, connection: Connection, message: Data) -> None:
        size, leg = self._store.page_bytes, receiving.leg
        count = leg.expected_pages(message)
        if message.num_bytes != count * size:
            raise ProtocolError("it sends another number of bytes than its pages have")
        async with self._buffers.take() as buffer:
            await connection.receive_into(buffer[: message.num_bytes])
            if leg.over:
                return
            actions = leg.received(message, _digests_of(buffer, count, size), time.monotonic())
            self._act_receiving(key, receiving, actions, buffer)

    def _act_receiving(
        self, key: Key, receiving: _Receiving, actions: Sequence[Action], buffer: memoryview | None = None
    ) -> None:
        for action in actions:
            match action:
                case Send(message):
                    if receiving.connection is not None:
                        receiving.connection.send(message)
                case Connect(delay_s):
                    receiving.task = self._spawn(self._fetch(key, receiving, delay_s))
                case Store(first, count):
                    assert buffer is not None, "pages are stored that did not come"
                    own = receiving.pages[first - receiving.first :][:count]
                    self._store.write(own, buffer[: count * self._store.page_bytes])
                    self.counters.num_pages_received += count
                case Close():
                    self._drop(key, receiving)
                case Serve():
                    raise AssertionError("a decode leg wants to serve")
                case _:
                    self.counters.num_failed += isinstance(action, Failed)
                    self._tell(key, action)

    def _drop(self, key: Key, receiving: _Receiving) -> None:
        """Its connection ends now; from here on nothing of it is stored."""
        if self._receiving.get(key) is receiving:
            del self._receiving[key]
        task = receiving.task
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()


def _digests_of(buffer: memoryview, count: int, page_bytes: int) -> list[int]:
    return [xxh3_64_intdigest(buffer[at * page_bytes : (at + 1) * page_bytes]) for at in range(count)]
