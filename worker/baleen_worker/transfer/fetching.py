"""The decode side of transfers: fetches the pages of legs whose prompts other workers compute.

What is asked and when is decided in `receiving.py`. Pages that come over a connection are filled in place where they
are in host memory; others come into staging memory and are stored through the `PageStore`. Pages of a peer that lends
its memory are copied out of it, and then the peer is asked what they were worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import Action, Close, Connect, Failed, ProtocolError, Report, Send, Serve, Store
from baleen_worker.transfer.digests import Digests
from baleen_worker.transfer.handshake import GREETING_S, introduce, reach, unreachable
from baleen_worker.transfer.lending import LoanError
from baleen_worker.transfer.messages import Computed, Data, FromPrefill, Key, Read, Sealed, Stale, Took
from baleen_worker.transfer.receiving import WINDOW, ReceivingLeg
from baleen_worker.transfer.wire import StrangerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baleen_worker.transfer.borrowing import Borrower
    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.lending import Loan
    from baleen_worker.transfer.orders import Expect, Receive
    from baleen_worker.transfer.station import Station


@dataclass(frozen=True, slots=True)
class _Copy:
    """`digests` come when it is done."""

    read: Read
    digests: asyncio.Future[list[int]]


@dataclass(slots=True)
class _Receiving:
    """`pages` are reserved for places from `first` on.

    `loan`: the peer's memory, if pages are copied from there. `copies` are under way; by first place, `begun` has those
    that the leg has not asked for yet, and `taken` the digests of those that are done and not judged yet.
    """

    leg: ReceivingLeg
    expect: Expect
    task: asyncio.Task[None] | None = None
    connection: Connection | None = None
    was_refused: bool = False
    loan: Loan | None = None
    first: int = 0
    pages: Sequence[int] = ()
    copies: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    begun: dict[int, _Copy] = field(default_factory=dict[int, "_Copy"])
    taken: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def places(self, first: int, count: int) -> Sequence[int]:
        """The pages of so many places."""
        return self.pages[first - self.first :][:count]


class Fetcher:
    """Decode legs by key, and their connections."""

    def __init__(self, station: Station, borrower: Borrower, vocab_size: int) -> None:
        self._station = station
        self._borrower = borrower
        self._vocab_size = vocab_size
        self._receiving: dict[Key, _Receiving] = {}

    # --- what the engine orders -------------------------------------------------------------------------------------

    def expect(self, order: Expect, now_s: float) -> None:
        """A leg is here: its peer is asked at once."""
        leg = ReceivingLeg(
            order.key,
            self._station.timers,
            num_pages=order.num_pages,
            num_scored=order.num_scored,
            vocab_size=self._vocab_size,
            pages_per_read=self._station.pages_per_read,
            now_s=now_s,
        )
        receiving = self._receiving[order.key] = _Receiving(leg, order)
        self._act(order.key, receiving, leg.start())

    def receive(self, order: Receive, now_s: float) -> None:
        """Pages are reserved for a leg, if that still lives."""
        receiving = self._receiving.get(order.key)
        if receiving is not None:
            receiving.first, receiving.pages = order.first, order.pages
            self._act(order.key, receiving, receiving.leg.reserve(order.first, now_s))

    def cancel(self, key: Key) -> None:
        """The leg, if there is one, is over here."""
        receiving = self._receiving.get(key)
        if receiving is not None:
            self._act(key, receiving, receiving.leg.cancel())

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for key, receiving in list(self._receiving.items()):
            self._act(key, receiving, receiving.leg.tick(now_s))

    # --- connections ------------------------------------------------------------------------------------------------

    async def _fetch(self, key: Key, receiving: _Receiving, delay_s: float) -> None:
        """One connection of a leg, from its making to its end."""
        await asyncio.sleep(delay_s)
        if receiving.copies:  # of the connection before: they must not come after what is read over this one
            await asyncio.wait(receiving.copies)
        leg = receiving.leg
        try:
            reason = await self._talk(key, receiving)
        except (StrangerError, ProtocolError, LoanError) as error:
            if not leg.over:
                self._station.complain(receiving.connection, str(error))
                self._act(key, receiving, leg.rejected(str(error)))
            reason = str(error)
        except TimeoutError:
            reason = "it does not answer"
        except OSError as error:
            reason = unreachable(error)
        finally:
            if receiving.connection is not None:
                receiving.connection.socket.close()
                receiving.connection = None
            receiving.taken.clear()
            receiving.begun.clear()
        if not leg.over:
            self._act(key, receiving, leg.lost(reason, time.monotonic()))

    async def _talk(self, key: Key, receiving: _Receiving) -> str:
        """Until the connection or the leg ends; returns why."""
        try:
            connection = await self._greet(receiving)
        except StrangerError as error:
            # A greeting that was damaged on its way looks the same, and the next one comes whole.
            if receiving.was_refused:
                raise
            receiving.was_refused = True
            return str(error)
        loan = receiving.loan
        writer = self._station.spawn(connection.write_queued())
        try:
            with contextlib.nullcontext() if loan is None else loan.used():
                await self._listen(key, receiving, connection)
        except EOFError:
            pass
        finally:
            writer.cancel()
        return "its connection has ended"

    async def _greet(self, receiving: _Receiving) -> Connection:
        """A connection to the peer, which both know, and the loan of its memory if it lends."""
        station, leg = self._station, receiving.leg
        loan = receiving.loan = await self._borrower.loan(receiving.expect.peer)
        leg.pages_per_read = station.pages_per_read if loan is None else loan.pages_per_read
        leg.copies = loan is not None
        async with asyncio.timeout(GREETING_S):
            connection = receiving.connection = await reach(station, receiving.expect.peer)
            await introduce(station, connection, receiving.expect.peer)
        return connection

    async def _listen(self, key: Key, receiving: _Receiving, connection: Connection) -> None:
        """Until the leg is over. Raises EOFError when the connection ends before."""
        leg, loan = receiving.leg, receiving.loan
        self._act(key, receiving, leg.connected(time.monotonic()))
        while not leg.over:
            message = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
            if isinstance(message, Data) and loan is None:
                await self._take_pages(key, receiving, connection, message)
            elif isinstance(message, Computed) and loan is not None:
                self._begin(receiving, loan, message)
            elif isinstance(message, Sealed | Stale) and loan is not None:
                digests = receiving.taken.pop(message.first, None)
                if digests is None:
                    raise ProtocolError("it answers a read that was not sent")
                self._take_verdict(key, receiving, message, message.first, digests)
            elif not leg.over:
                self._act(key, receiving, leg.hear(message, time.monotonic()))

    async def _take_pages(self, key: Key, receiving: _Receiving, connection: Connection, data: Data) -> None:
        """The answer to a read, which is in one piece on its connection.

        Pages in host memory are filled in place: they are reserved for this leg, and nobody looks at them before the
        leg has arrived.
        """
        store, leg = self._station.store, receiving.leg
        count = leg.expected_pages(data)
        if data.num_bytes != count * store.page_bytes:
            raise ProtocolError("it sends another number of bytes than its pages have")
        if views := store.views(receiving.places(data.first, count)):
            digests = Digests(views, count)
            await connection.receive_views([view.reshape(-1).data for view in views], digests.go_on)
            verdict = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
            self._take_verdict(key, receiving, verdict, data.first, digests.of_pages())
            return
        async with self._station.buffers.take() as buffer:
            staged = buffer[: data.num_bytes]
            await connection.receive_into(staged)
            verdict = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
            if self._station.device is None or leg.over:
                self._take_verdict(key, receiving, verdict, data.first, self._station.digests_of(staged, count), staged)
                return
            # Pages on a device are stored first: their digest can only be had there.
            ours = receiving.places(data.first, count)
            store.write(ours, staged)
            self._take_verdict(key, receiving, verdict, data.first, self._station.digests(ours))

    def _take_verdict(
        self,
        key: Key,
        receiving: _Receiving,
        message: FromPrefill,
        first: int,
        digests: list[int],
        staged: memoryview | None = None,
    ) -> None:
        leg, now_s = receiving.leg, time.monotonic()
        if leg.over:
            return
        if isinstance(message, Sealed) and message.first == first:
            actions = leg.received(message, digests, now_s)
            self._station.counters.num_damaged_reads += not any(isinstance(action, Store) for action in actions)
            self._act(key, receiving, actions, staged)
        elif isinstance(message, Stale) and message.first == first:
            self._act(key, receiving, leg.hear(message, now_s))
        else:
            raise ProtocolError("it does not say what the pages it has sent are worth")

    # --- what a leg asks for ----------------------------------------------------------------------------------------

    def _act(
        self, key: Key, receiving: _Receiving, actions: Sequence[Action], staged: memoryview | None = None
    ) -> None:
        station = self._station
        for action in actions:
            match action:
                case Send(Read() as read) if receiving.loan is not None:
                    self._copy(key, receiving, receiving.loan, read)
                case Send(message):
                    if receiving.connection is not None:
                        receiving.connection.send(message)
                case Connect(delay_s):
                    receiving.task = station.spawn(self._fetch(key, receiving, delay_s))
                case Store(first, count):
                    if staged is not None:
                        station.store.write(receiving.places(first, count), staged[: count * station.store.page_bytes])
                    station.counters.num_pages_received += count
                case Close():
                    self._drop(key, receiving)
                case Serve():
                    raise AssertionError("a decode leg wants to serve")
                case _:
                    station.counters.num_failed += isinstance(action, Failed)
                    self._tell(key, receiving, action)

    def _begin(self, receiving: _Receiving, loan: Loan, message: Computed) -> None:
        """Copies pages that will be announced, as the leg will ask for them; what fails now will fail again then."""
        count = min(len(message.pages), receiving.leg.pages_per_read)
        read = Read(message.first, message.pages[:count], message.generations[:count])
        if count and len(receiving.begun) < WINDOW and receiving.leg.has_use_for(read.first, count):
            with contextlib.suppress(LoanError, ConnectionError):
                receiving.begun[read.first] = _Copy(read, self._fill(receiving, loan, read))

    def _copy(self, key: Key, receiving: _Receiving, loan: Loan, read: Read) -> None:
        """Copies pages out of lent memory, unless that has begun already, and then asks what they are worth."""
        task = self._station.spawn(self._take_lent(key, receiving, loan, read))
        receiving.copies.add(task)
        task.add_done_callback(receiving.copies.discard)

    def _fill(self, receiving: _Receiving, loan: Loan, read: Read) -> asyncio.Future[list[int]]:
        """Starts; raises like `Loan.fill`."""

        def end(copy: asyncio.Future[list[int]]) -> None:
            receiving.copies.discard(copy)
            if not copy.cancelled():
                copy.exception()  # nobody may ever ask for it

        copy = loan.fill(read.pages, receiving.places(read.first, len(read.pages)))
        receiving.copies.add(copy)
        copy.add_done_callback(end)
        return copy

    async def _take_lent(self, key: Key, receiving: _Receiving, loan: Loan, read: Read) -> None:
        connection, leg = receiving.connection, receiving.leg
        begun = receiving.begun.pop(read.first, None)
        try:
            if begun is None or begun.read != read:
                begun = _Copy(read, self._fill(receiving, loan, read))
            digests = await begun.digests
        except LoanError as error:
            if not leg.over:
                self._station.complain(connection, str(error))
                self._act(key, receiving, leg.rejected(str(error)))
            return
        except ConnectionError:  # the loan is over, so the peer is gone, and this connection with it
            digests = []
        if receiving.connection is connection and connection is not None and not leg.over:
            if not digests:
                connection.shut()
                return
            receiving.taken[read.first] = digests
            connection.send(Took(read.first, read.pages, read.generations))

    def _tell(self, key: Key, receiving: _Receiving, report: Report) -> None:
        """News for the engine: of the end of a leg, once nothing is copied into its pages any more."""

        async def wait() -> None:
            await asyncio.wait(copies)
            self._station.tell(key, report)

        copies = {task for task in receiving.copies if task is not asyncio.current_task(self._station.loop)}
        if copies and receiving.leg.over:
            self._station.spawn(wait())
        else:
            self._station.tell(key, report)

    def _drop(self, key: Key, receiving: _Receiving) -> None:
        """Its connection ends now; from here on nothing of it is stored."""
        if self._receiving.get(key) is receiving:
            del self._receiving[key]
        task = receiving.task
        if task is not None and task is not asyncio.current_task(self._station.loop):
            task.cancel()
