"""Greetings over a connection: each end learns that the other is one to exchange pages with.

What is said and proven is decided in `wire.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from baleen_worker.transfer import wire
from baleen_worker.transfer.connection import connect
from baleen_worker.transfer.messages import Challenge, Response, Welcome
from baleen_worker.transfer.wire import StrangerError

if TYPE_CHECKING:
    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.orders import Peer
    from baleen_worker.transfer.station import Station

GREETING_S = 5.0


async def greet(station: Station, connection: Connection) -> None:
    """The prefill side's part. Raises StrangerError, EOFError, OSError."""
    said = wire.challenge(station.identity)
    await connection.write(wire.encode(said))
    heard = wire.decode_from_decode(await connection.receive(wire.MAX_GREETING_BYTES))
    if not isinstance(heard, Response):
        raise StrangerError("it does not answer the challenge")
    await connection.write(wire.encode(wire.welcome(station.identity, said, heard)))


async def reach(station: Station, peer: Peer) -> Connection:
    """A connection to a prefill worker; whoever gets it closes it. Raises OSError when there is none."""
    return await connect(station.loop, peer.address, station.timers.progress_s)


def unreachable(error: OSError) -> str:
    """What is said of a worker that there is no connection to."""
    return f"it cannot be reached ({os.strerror(error.errno) if error.errno else error})"


async def introduce(station: Station, connection: Connection, peer: Peer) -> None:
    """The decode side's part, on a connection to that worker. Raises StrangerError, EOFError, OSError."""
    heard = wire.decode_from_prefill(await connection.receive(wire.MAX_GREETING_BYTES))
    if not isinstance(heard, Challenge):
        raise StrangerError("it does not say what it is")
    said = wire.respond(station.identity, heard, boot_epoch=peer.boot_epoch, dp_rank=peer.dp_rank)
    await connection.write(wire.encode(said))
    try:
        answer = wire.decode_from_prefill(await connection.receive(wire.MAX_GREETING_BYTES))
    except EOFError:
        raise StrangerError("it does not accept this worker: its log says why") from None
    if not isinstance(answer, Welcome):
        raise StrangerError("it does not prove that it knows the key")
    wire.check_welcome(station.identity, heard, said, answer)
