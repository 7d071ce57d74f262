"""Loans whose pages couriers bring: the owner copies pages into staging memory, and the reader's courier fetches them.

No library sees a page on either side. Each loan has a courier at both ends and its own connection, over which the
reader says what is to be staged where; slots of staging memory are the reader's to fill and to use again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.lending import LoanError, host_name
from baleen_worker.transfer.messages import FromDecode, FromPrefill, Gather, Gathered, Lend, Lent

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.couriers import Courier, Couriers
    from baleen_worker.transfer.station import Station

# Reads under way at a time: one is staged, one is on its way, one is copied to its pages.
NUM_SLOTS = 3
_MAX_ADDRESS = 1 << 63


class _Staging(msgspec.Struct, frozen=True, array_like=True):
    """What `Lent.memory` is: how the courier is reached, and where its slots are."""

    where: bytes
    address: int
    num_slots: int
    slot_bytes: int


_decoder: msgspec.msgpack.Decoder[_Staging] = msgspec.msgpack.Decoder(_Staging)


class StagedLoan:
    """The reader's end, see `Loan`. The first failure of a read, whatever it is, ends the loan."""

    def __init__(self, station: Station, courier: Courier, connection: Connection, lent: bytes) -> None:
        """Raises LoanError."""
        try:
            self._theirs = _decoder.decode(lent)
        except msgspec.DecodeError as error:
            raise LoanError(f"what it lends is no memory: {error}") from None
        if not 0 < self._theirs.address < _MAX_ADDRESS or self._theirs.slot_bytes > _MAX_ADDRESS:
            raise LoanError("what it lends is no memory: it has no such addresses")
        self.pages_per_read = min(station.staged_pages, self._theirs.slot_bytes // station.store.page_bytes)
        num_slots = min(NUM_SLOTS, self._theirs.num_slots)
        if self.pages_per_read < 1 or num_slots < 1:
            raise LoanError("what it lends is no memory: it has no room for a page")
        self._station = station
        self._courier = courier
        self._connection = connection
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(num_slots):
            self._free.put_nowait(slot)
        self._gathered: dict[int, asyncio.Future[None]] = {}
        self._last: asyncio.Task[list[int]] | None = None
        self._is_over = False

    async def reach(self) -> None:
        """Has the two couriers meet. Raises LoanError."""
        try:
            async with asyncio.timeout(self._station.timers.progress_s):
                await self._courier.reach(self._theirs.where)
        except (OSError, EOFError, TimeoutError) as error:
            raise LoanError(f"NIXL does not reach it: {str(error) or 'its process has ended'}") from None

    def used(self) -> AbstractContextManager[None]:
        """See `Loan`."""
        return contextlib.nullcontext()

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> asyncio.Future[list[int]]:
        """See `Loan`. What it returns raises ConnectionError."""
        if self._is_over:
            raise _over()
        self._last = self._station.loop.create_task(self._fill([*theirs], [*ours], self._last))
        return self._last

    def hear(self, message: FromPrefill) -> None:
        """Something came over the loan's connection. Raises ProtocolError."""
        staged = self._gathered.pop(message.slot, None) if isinstance(message, Gathered) else None
        if staged is None:
            raise ProtocolError("it stages what nobody asked for")
        if not staged.done():
            staged.set_result(None)

    def end(self) -> None:
        """Nothing is copied to pages any more."""
        self._is_over = True
        self._connection.shut()
        for staged in self._gathered.values():
            if not staged.done():
                staged.set_exception(_over())

    async def _fill(self, theirs: list[int], ours: list[int], before: asyncio.Task[list[int]] | None) -> list[int]:
        """In the order in which they began, so that a read which is void cannot come after its repetition."""
        # Comes: a read makes progress or ends the loan, and gives its slot back either way.
        slot = await self._free.get()
        try:
            async with asyncio.timeout(self._station.timers.progress_s):
                await self._gather(slot, theirs)
            if before is not None:
                await asyncio.wait([before])
            async with asyncio.timeout(self._station.timers.progress_s):
                staged = await self._fetch(slot, len(ours))
            if self._is_over:
                raise _over()
            self._station.store.write(ours, staged)
        except (OSError, EOFError, TimeoutError) as error:
            self.end()
            raise ConnectionResetError(f"pages do not come: {error}") from None
        finally:
            self._free.put_nowait(slot)
        return self._station.digests(ours)

    async def _gather(self, slot: int, pages: list[int]) -> None:
        if self._is_over:
            raise _over()
        staged = self._gathered[slot] = self._station.loop.create_future()
        self._connection.send(Gather(slot, pages))
        await staged

    async def _fetch(self, slot: int, num_pages: int) -> memoryview:
        store = self._station.store
        offset, num_bytes = slot * self._station.staged_pages * store.page_bytes, num_pages * store.page_bytes
        await self._courier.fetch(self._theirs.address + slot * self._theirs.slot_bytes, offset, num_bytes)
        return self._courier.memory[offset : offset + num_bytes]


def _over() -> ConnectionResetError:
    return ConnectionResetError("the loan is over")


def staging_bytes(station: Station) -> int:
    """What one courier needs."""
    return NUM_SLOTS * station.staged_pages * station.store.page_bytes


async def lend_staged(station: Station, couriers: Couriers, connection: Connection) -> NoReturn:
    """The owner's end: stages pages as it is told, until the connection or the courier ends.

    Raises LoanError, EOFError, ProtocolError, OSError, StrangerError.
    """
    slot_bytes = station.staged_pages * station.store.page_bytes
    async with couriers.employ(staging_bytes(station)) as courier:
        ready = await courier.ready()
        memory = msgspec.msgpack.encode(_Staging(ready.where, ready.address, NUM_SLOTS, slot_bytes))
        order: FromDecode = Lend()
        with courier.watched(connection.shut):
            while True:
                if isinstance(order, Lend):
                    [sample] = station.digests([SINK_PAGE])
                    await connection.write(wire.encode(Lent(couriers.kind.value, host_name(), memory, sample)))
                elif isinstance(order, Gather):
                    _stage(station, courier, order)
                    await connection.write(wire.encode(Gathered(order.slot)))
                else:
                    raise ProtocolError("it speaks where it borrows")
                order = wire.decode_from_decode(await connection.receive(wire.MAX_FRAME_BYTES))


def _stage(station: Station, courier: Courier, order: Gather) -> None:
    """Whose pages these are is looked at after they have been copied, as ever, see `Took`."""
    store, pages = station.store, order.pages
    if not 0 <= order.slot < NUM_SLOTS or not 0 < len(pages) <= station.staged_pages:
        raise ProtocolError("it has pages staged where there is no room")
    if not 0 <= min(pages) <= max(pages) < store.num_pages:
        raise ProtocolError("it has pages staged that are not there")
    offset = order.slot * station.staged_pages * store.page_bytes
    store.read(pages, courier.memory[offset : offset + len(pages) * store.page_bytes])
