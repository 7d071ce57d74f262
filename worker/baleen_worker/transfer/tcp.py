"""Transfers over TCP: all legs of one rank, in a thread with an event loop of its own, one connection a leg.

Where both workers can, pages are read from lent memory (`lending.py`), and the connection carries only words. The
engine gives orders and takes news without waiting. `station.py` owns the thread and what both sides share,
`serving.py` the legs whose prompts are computed here, `fetching.py` those whose prompts are computed elsewhere,
`borrowing.py` the memory that is lent, `probing.py` the trials of a way to another worker; who may speak is
`handshake.py`'s business.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.transfer.borrowing import Borrower
from baleen_worker.transfer.connection import bind
from baleen_worker.transfer.fetching import Fetcher
from baleen_worker.transfer.orders import Cancel, Expect, Open, Order, Probe, Receive
from baleen_worker.transfer.probing import probe
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.serving import Server
from baleen_worker.transfer.station import Counters, Station

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baleen_worker.output import Load
    from baleen_worker.step import PageStore
    from baleen_worker.transfer.actions import Timers
    from baleen_worker.transfer.orders import News
    from baleen_worker.transfer.wire import Identity

_TICK_S = 0.2
OVER_TCP = Reading()


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
        reading: Reading = OVER_TCP,
    ) -> None:
        """`generation` says how often a page was granted; asked from this thread. `wait` looks at files of `inbox` too.

        `listen`: where to serve pages, port 0 for a free one; None: nowhere. Raises OSError when that is taken.
        """
        listener, self.address = (None, None) if listen is None else bind(*listen)
        self._station = station = Station(store, identity, timers, inbox)
        self._borrower = Borrower(station, reading)
        self._server = Server(station, generation, reading)
        self._fetcher = Fetcher(station, self._borrower, vocab_size)
        station.spawn(self._keep_time())
        if listener is not None:
            station.spawn(self._server.listen(listener))
        station.run()

    # --- the engine's side ------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What has travelled and gone wrong since the start."""
        return self._station.counters

    def give(self, orders: Sequence[Order]) -> None:
        """Orders are carried out in order."""
        if orders:
            self._station.post(lambda: self._take_orders(orders))

    def take(self) -> list[News]:
        """News since the last call."""
        return self._station.take()

    def account(self, load: Load) -> Load:
        """The load with this transfer's counters filled in."""
        counters = self.counters
        return msgspec.structs.replace(
            load,
            sent_pages=counters.num_pages_sent,
            received_pages=counters.num_pages_received,
            stale_reads=counters.num_stale_reads,
            damaged_reads=counters.num_damaged_reads,
            failed_transfers=counters.num_failed,
            dropped_peers=counters.num_dropped,
        )

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there is news or something to read from the sockets, or the time is over."""
        self._station.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._station.close()
        self._borrower.close()

    # --- the loop's side --------------------------------------------------------------------------------------------

    def _take_orders(self, orders: Sequence[Order]) -> None:
        now_s = time.monotonic()
        for order in orders:
            match order:
                case Expect():
                    self._fetcher.expect(order, now_s)
                case Receive():
                    self._fetcher.receive(order, now_s)
                case Cancel(key):
                    self._server.cancel(key)
                    self._fetcher.cancel(key)
                case Open(key):
                    self._server.open(key)
                case Probe():
                    self._station.spawn(probe(self._station, self._borrower, order))
                case _:
                    self._server.offer(order, now_s)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._server.tick(now_s)
            self._fetcher.tick(now_s)
