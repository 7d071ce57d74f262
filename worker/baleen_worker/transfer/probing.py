"""Trials of the way from a prefill worker to this one: what a request's pages need, without a request.

The decode side connects, is greeted and greets, asks for a sample and stores it in its own sink page, which both sides
may write at any time because nobody reads it. Connection, key, layout, weights, boot epoch, digest, both workers'
page copies: what would fail a request fails the trial, with the same words. Where pages are read from lent memory, the
sink page is read once more that way.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.handshake import introduce, reach, unreachable
from baleen_worker.transfer.lending import LoanError
from baleen_worker.transfer.messages import Sample, Sampled
from baleen_worker.transfer.orders import ProbeEnded
from baleen_worker.transfer.wire import StrangerError

if TYPE_CHECKING:
    from baleen_worker.transfer.borrowing import Borrower
    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.orders import Probe
    from baleen_worker.transfer.station import Station


async def probe(station: Station, borrower: Borrower, order: Probe) -> None:
    """One trial from the decode side; ends with news."""
    began_s = time.monotonic()
    failure = None
    try:
        async with asyncio.timeout(station.timers.progress_s):
            connection = await reach(station, order.peer)
            try:
                await introduce(station, connection, order.peer)
                await _take_sample(station, connection)
            finally:
                connection.socket.close()
        async with asyncio.timeout(station.timers.progress_s + borrower.start_s):
            await borrower.probe(order.peer)
    except (StrangerError, ProtocolError, LoanError) as error:
        failure = str(error)
    except EOFError:
        failure = "its connection has ended"
    except TimeoutError:
        failure = "it does not answer"
    except OSError as error:
        failure = unreachable(error)
    station.publish(ProbeEnded(order.ticket, time.monotonic() - began_s, failure))


async def _take_sample(station: Station, connection: Connection) -> None:
    size = station.store.page_bytes
    await connection.write(wire.encode(Sample()))
    heard = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
    if not isinstance(heard, Sampled):
        raise ProtocolError("it does not answer with a sample")
    if heard.num_bytes != size:
        raise ProtocolError("it sends another number of bytes than a page has")
    async with station.buffers.take() as buffer:
        await connection.receive_into(buffer[:size])
        if station.digests_of(buffer, 1) != [heard.digest]:
            raise ProtocolError("pages come damaged")
        station.store.write([SINK_PAGE], buffer[:size])


async def serve_sample(station: Station, connection: Connection) -> None:
    """The prefill side: a copy of its sink page. Raises OSError, TimeoutError."""
    size = station.store.page_bytes
    async with asyncio.timeout(station.timers.progress_s), station.buffers.take() as buffer:
        station.store.read([SINK_PAGE], buffer[:size])
        [digest] = station.digests_of(buffer, 1)
        await connection.write(wire.encode(Sampled(size, digest)))
        await connection.write(buffer[:size])
