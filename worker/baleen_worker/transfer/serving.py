"""The prefill side of transfers: listens, and serves the legs whose prompts are computed here.

What is said and when is decided in `sending.py`. Pages of a leg are read through the `PageStore`, and their generations
are looked at after the copy. A peer that does not take its data in time is cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import Action, Close, Connect, HandedOver, ProtocolError, Send, Serve, Store
from baleen_worker.transfer.borrowing import lend
from baleen_worker.transfer.connection import Connection
from baleen_worker.transfer.handshake import GREETING_S, greet
from baleen_worker.transfer.messages import (
    Chunk,
    Computed,
    Data,
    Key,
    Lend,
    Read,
    Refused,
    Released,
    Sample,
    Scores,
    Sealed,
    Stale,
    Wait,
    Want,
)
from baleen_worker.transfer.orders import Finish, Offer, Score, Withdraw
from baleen_worker.transfer.probing import serve_sample
from baleen_worker.transfer.sending import SendingLeg
from baleen_worker.transfer.wire import StrangerError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from baleen_worker.transfer.reading import Reading
    from baleen_worker.transfer.station import Station

_MAX_CONNECTIONS = 2048
_MAX_REMEMBERED = 4096
# Log-probabilities of so many prompt tokens fit a frame, with all their alternatives.
_SCORES_PER_FRAME = 4096


@dataclass(slots=True)
class _Sending:
    leg: SendingLeg
    connection: Connection | None = None


class Server:
    """Prefill legs by key, and the connections of their peers."""

    def __init__(self, station: Station, generation: Callable[[int], int], reading: Reading) -> None:
        """`generation` says how often a page was granted."""
        self._station = station
        self._reading = reading
        self._generation = generation
        self._sending: dict[Key, _Sending] = {}
        self._handed_over: OrderedDict[Key, None] = OrderedDict()
        # Peers of legs that have not come yet, and whether they copy.
        self._early: dict[Key, tuple[Connection, bool]] = {}
        self._num_connections = 0

    # --- what the engine orders -------------------------------------------------------------------------------------

    def open(self, key: Key) -> None:
        """A leg may be asked for from now on."""
        self._sending[key] = _Sending(SendingLeg(self._station.timers))
        if (early := self._early.pop(key, None)) is not None:
            self._attach(key, *early)

    def offer(self, order: Offer | Score | Finish | Withdraw, now_s: float) -> None:
        """There is something for the peer of a leg, if that still lives."""
        sending = self._sending.get(order.key)
        if sending is None:
            return
        if isinstance(order, Offer):  # said at once: the peer copies while this side digests
            computed = Computed(order.first, [*order.pages], [*order.generations])
            self._act(order.key, sending, sending.leg.computed(computed, now_s))
        self._act(order.key, sending, self._take_offer(sending.leg, order, now_s))

    def cancel(self, key: Key) -> None:
        """The leg, if there is one, is over here."""
        sending = self._sending.get(key)
        if sending is not None:
            self._act(key, sending, sending.leg.cancel("the prefill leg is over"))
            self._sending.pop(key, None)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for key, sending in list(self._sending.items()):
            self._act(key, sending, sending.leg.tick(now_s))
        for key, (connection, _) in list(self._early.items()):
            if now_s - connection.since_s > self._station.timers.lease_s:
                self._station.complain(connection, "it wants a leg that never came")
                del self._early[key]
                connection.send(Refused("no such request has come here"))
                connection.finish()
            else:
                connection.send(Wait())

    def _take_offer(self, leg: SendingLeg, order: Offer | Score | Finish | Withdraw, now_s: float) -> Sequence[Action]:
        match order:
            case Offer(_, first, pages, generations):
                digests = self._station.digests(pages)
                return leg.announce(Chunk(first, [*pages], [*generations], digests), now_s)
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

    # --- connections ------------------------------------------------------------------------------------------------

    async def listen(self, listener: socket.socket) -> None:
        """Takes connections until it is cancelled; then the listener is closed."""
        station = self._station
        with listener:
            while True:
                accepted, peer = await station.loop.sock_accept(listener)
                connection = Connection(station.loop, accepted, f"{peer[0]}:{peer[1]}", station.timers.progress_s)
                if self._num_connections >= _MAX_CONNECTIONS:
                    station.complain(connection, "there are too many connections")
                    accepted.close()
                    continue
                station.spawn(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        self._num_connections += 1
        try:
            async with asyncio.timeout(GREETING_S):
                await greet(self._station, connection)
                want = wire.decode_from_decode(await connection.receive(wire.MAX_GREETING_BYTES))
            match want:
                case Want(request_id, attempt, copies):
                    await self._serve_leg((request_id, attempt), connection, copies=copies)
                case Sample():
                    await serve_sample(self._station, connection)
                case Lend(sample_only):
                    await lend(self._station, self._reading, connection, sample_only=sample_only)
                case _:
                    raise ProtocolError("it does not say what it wants")
        except (StrangerError, ProtocolError, ConnectionAbortedError) as error:
            self._station.complain(connection, str(error))
        except TimeoutError:
            self._station.complain(connection, "it does not introduce itself")
        except (OSError, EOFError):
            pass  # it is gone, and may come again
        finally:
            self._num_connections -= 1
            connection.socket.close()

    async def _serve_leg(self, key: Key, connection: Connection, *, copies: bool) -> None:
        if key in self._early:
            raise ProtocolError("another connection wants the same leg")
        writer = self._station.spawn(connection.write_queued())
        try:
            if key in self._sending:
                self._attach(key, connection, copies)
            elif key in self._handed_over:
                connection.send(Released())
            else:
                self._early[key] = connection, copies
            while True:
                message = wire.decode_from_decode(await connection.receive(wire.MAX_FRAME_BYTES))
                sending = self._sending.get(key)
                if sending is not None and sending.connection is connection:
                    self._act(key, sending, sending.leg.hear(message, time.monotonic()))
        finally:
            if key in self._early and self._early[key][0] is connection:
                del self._early[key]
            sending = self._sending.get(key)
            if sending is not None and sending.connection is connection:
                sending.connection = None
                sending.leg.detach()
            writer.cancel()

    def _attach(self, key: Key, connection: Connection, copies: bool) -> None:
        sending = self._sending[key]
        if sending.connection is not None:
            sending.connection.shut()
        sending.connection = connection
        self._act(key, sending, sending.leg.attach(time.monotonic(), copies=copies))

    # --- what a leg asks for ----------------------------------------------------------------------------------------

    def _act(self, key: Key, sending: _Sending, actions: Sequence[Action]) -> None:
        connection = sending.connection
        for action in actions:
            match action:
                case Send(message):
                    if connection is not None:
                        connection.send(message)
                case Serve(read, taken):
                    if connection is not None and taken:
                        connection.send(self._judge(sending.leg, read))
                    elif connection is not None:
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
                    self._station.tell(key, action)

    def _remember(self, key: Key) -> None:
        """A peer whose acknowledgement was answered in vain may ask again."""
        self._handed_over[key] = None
        if len(self._handed_over) > _MAX_REMEMBERED:
            self._handed_over.popitem(last=False)

    def _serve_read(self, leg: SendingLeg, read: Read, connection: Connection) -> None:
        station = self._station
        num_bytes = len(read.pages) * station.store.page_bytes
        if len(read.pages) > station.pages_per_read:
            raise ProtocolError(f"it reads more than {station.pages_per_read} pages at once")

        async def answer() -> None:
            if not leg.holds(read):
                station.counters.num_stale_reads += 1
                await connection.write(wire.encode(Stale(read.first, len(read.pages))))
                return
            await connection.write(wire.encode(Data(read.first, num_bytes)))
            await station.write_pages(read.pages, connection)
            await connection.write(wire.encode(self._judge(leg, read)))

        connection.send_pages(answer)

    def _judge(self, leg: SendingLeg, read: Read) -> Sealed | Stale:
        """What pages are worth that have just been copied out."""
        counters = self._station.counters
        # What is not announced may have no generation either.
        generations = [self._generation(page) for page in read.pages] if leg.holds(read) else []
        verdict = leg.copied(read, generations, time.monotonic())
        counters.num_stale_reads += isinstance(verdict, Stale)
        counters.num_pages_sent += len(read.pages) * isinstance(verdict, Sealed)
        return verdict
