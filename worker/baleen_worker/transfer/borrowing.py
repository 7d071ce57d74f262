"""Memory of prefill workers that this rank has borrowed: one connection and one mapping for each, shared by all legs.

Whoever lends keeps the connection open for as long as it lives: its end is the end of the mapping, so that the memory
of a worker that is gone goes back to the device. A thread beside the loop's waits for copies, which are done in the
order in which they were started; it maps and unmaps in between, so nothing is unmapped under a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.couriers import Couriers
from baleen_worker.transfer.handshake import introduce, reach
from baleen_worker.transfer.lending import Backend, LoanError, host_name
from baleen_worker.transfer.messages import FromPrefill, Lend, Lent, Refused
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.staged import StagedLoan, lend_staged, staging_bytes
from baleen_worker.transfer.wire import StrangerError

if TYPE_CHECKING:
    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.lending import Borrowed, Loan
    from baleen_worker.transfer.orders import Peer
    from baleen_worker.transfer.station import Station

_Result = TypeVar("_Result")

# Bytes that one read from lent memory asks for, unless a page is larger: few launches, many bytes in flight.
_COPY_BYTES = 1 << 30
_MAX_SAMPLES = 5
# NVLinks sleep after 50 ms without traffic, and a prompt's chunk is computed in more: its last one would wait for them.
_TOUCH_S = 0.03
_MAX_REFUSALS = 256


class MappedLoan:
    """The `Loan` of memory that is read where it is."""

    def __init__(self, station: Station, waiter: ThreadPoolExecutor, borrowed: Borrowed) -> None:
        assert station.device is not None, "memory is borrowed for pages in host memory"
        self.pages_per_read = max(min(_COPY_BYTES // station.store.page_bytes, station.device.max_pages), 1)
        self._station = station
        self._waiter = waiter
        self._borrowed = borrowed
        self._is_over = False
        self._num_users = 0
        self._toucher: asyncio.Task[None] | None = None

    @property
    def is_kept_awake(self) -> bool:
        """Whether its memory is touched from time to time."""
        return self._toucher is not None

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Within, somebody may copy at any moment: the way to the memory is kept awake."""
        self._num_users += 1
        if self._toucher is None:
            self._toucher = self._station.spawn(self._touch())
        try:
            yield
        finally:
            self._num_users -= 1

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> asyncio.Future[list[int]]:
        """See `Loan`."""
        if not 0 <= min(theirs) <= max(theirs) < self._borrowed.num_pages:
            raise LoanError("it announces pages that its memory does not have")
        if self._is_over:
            raise ConnectionResetError("the loan is over")
        with _told_as_loan_error():
            wait = self._borrowed.fill(theirs, ours)
        return self._waited_for(wait)

    def hear(self, message: FromPrefill) -> None:
        """See `Loan`."""
        raise ProtocolError(f"it sends a {type(message).__name__} where it lends")

    def end(self) -> None:
        """See `Loan`."""
        self._is_over = True
        self._waiter.submit(self._borrowed.close)

    async def _touch(self) -> None:
        try:
            while self._num_users and not self._is_over:
                with _told_as_loan_error():
                    wait = self._borrowed.touch()
                await self._waited_for(wait)
                await asyncio.sleep(_TOUCH_S)
        except LoanError:
            pass  # legs will meet it too
        finally:
            self._toucher = None

    def _waited_for(self, wait: Callable[[], _Result]) -> asyncio.Future[_Result]:
        def wait_here() -> _Result:
            with _told_as_loan_error():
                return wait()

        return self._station.loop.run_in_executor(self._waiter, wait_here)


@contextlib.contextmanager
def _told_as_loan_error() -> Generator[None]:
    """Errors of the device."""
    try:
        yield
    except RuntimeError as error:
        raise LoanError(f"its memory cannot be read: {error}") from None


class Borrower:
    """Loans by peer."""

    def __init__(self, station: Station, reading: Reading) -> None:
        self._station = station
        self._reading = reading
        self._loans: dict[Peer, asyncio.Future[Loan]] = {}
        self._refusals: set[Peer] = set()  # whose pages come over TCP instead
        self._waiter = ThreadPoolExecutor(1, "transfer-copies")

    @property
    def start_s(self) -> float:
        """That it may take until a peer lends."""
        return 0.0 if self._reading.lender is None else self._reading.lender.start_s

    async def loan(self, peer: Peer) -> Loan | None:
        """The peer's memory; None where its pages come over connections.

        Raises LoanError, StrangerError, ProtocolError, OSError, EOFError, TimeoutError.
        """
        if self._reading.lender is None:
            return None
        if peer in self._refusals:
            return None
        if peer not in self._loans:
            self._loans[peer] = self._station.loop.create_future()
            self._station.spawn(self._keep(peer, self._loans[peer]))
        try:
            # Not the future itself: whoever is cancelled while waiting must not cancel it for others.
            return await asyncio.shield(self._loans[peer])
        except LoanError as error:
            if self._reading.backend is not Backend.AUTO:
                raise
            if len(self._refusals) >= _MAX_REFUSALS:
                self._refusals.clear()
            self._refusals.add(peer)
            self._station.remark(f"pages of the worker at {peer.address} come over TCP: {error}")
            return None

    async def probe(self, peer: Peer) -> None:
        """Fills the sink page from a peer's, as often as that takes while both write there. Raises like `loan`."""
        loan = await self.loan(peer)
        if loan is None:
            return
        connection = await reach(self._station, peer)
        try:
            await introduce(self._station, connection, peer)
            for _ in range(_MAX_SAMPLES):
                lent = await _ask(connection, Lend(sample_only=True))
                if await loan.fill([SINK_PAGE], [SINK_PAGE]) == [lent.sample]:
                    return
            raise ProtocolError("pages come damaged")
        finally:
            connection.socket.close()

    def close(self) -> None:
        """After the loop's tasks have ended."""
        self._waiter.shutdown()

    async def _keep(self, peer: Peer, told: asyncio.Future[Loan]) -> None:
        """One loan, from its asking to its end."""
        try:
            async with contextlib.AsyncExitStack() as held:
                connection, loan = await self._begin(peer, held)
                told.set_result(loan)
                while True:
                    loan.hear(wire.decode_from_prefill(await connection.receive(wire.MAX_GREETING_BYTES)))
        except (LoanError, StrangerError, ProtocolError, OSError, EOFError, TimeoutError) as error:
            if not told.done():
                told.set_exception(error)
                told.exception()  # nobody may be left who waits for it
            elif isinstance(error, StrangerError | ProtocolError):
                self._station.complain(None, str(error))
        finally:
            if self._loans.get(peer) is told:
                del self._loans[peer]

    async def _begin(self, peer: Peer, held: contextlib.AsyncExitStack) -> tuple[Connection, Loan]:
        """Asks a peer for its memory. What the loan needs ends with `held`, after the loan."""
        station, lender = self._station, self._reading.lender
        assert lender is not None, "nothing can be borrowed without a lender"
        courier = None
        if isinstance(lender, Couriers):
            courier = await held.enter_async_context(lender.employ(staging_bytes(station)))
        async with asyncio.timeout(self.start_s + station.timers.progress_s):
            connection = await reach(station, peer)
            held.callback(connection.socket.close)
            await introduce(station, connection, peer)
            lent = await _ask(connection, Lend())
            if courier is not None:
                await courier.ready()
        if lent.backend != lender.kind.value:
            raise LoanError(f"it lends its memory by {lent.backend}, not {lender.kind.value}")
        if courier is not None:
            loan = StagedLoan(station, courier, connection, lent.memory)
            await loan.reach()
            writer = station.spawn(connection.write_queued())
            held.callback(writer.cancel)
            held.enter_context(courier.watched(loan.end))
        else:
            loan = await self._map(lent)
        held.callback(loan.end)
        return connection, loan

    async def _map(self, lent: Lent) -> MappedLoan:
        lender = self._reading.lender
        assert lender is not None, "memory cannot be mapped without a lender"
        assert not isinstance(lender, Couriers), "what couriers bring is not mapped"
        if lent.host != host_name():
            raise LoanError("it runs on another host, whose memory cannot be mapped here")
        borrowed = await self._station.loop.run_in_executor(self._waiter, lender.borrow, lent.memory)
        return MappedLoan(self._station, self._waiter, borrowed)


async def _ask(connection: Connection, asked: Lend) -> Lent:
    await connection.write(wire.encode(asked))
    try:
        heard = wire.decode_from_prefill(await connection.receive(wire.MAX_FRAME_BYTES))
    except EOFError:
        raise LoanError("it lends nothing") from None
    if isinstance(heard, Refused):
        raise LoanError(heard.reason)
    if not isinstance(heard, Lent):
        raise ProtocolError("it does not answer with its memory")
    return heard


async def lend(station: Station, reading: Reading, connection: Connection, *, sample_only: bool) -> None:
    """The prefill side, to a peer that has asked: the memory, each time it asks, until it is gone.

    Raises EOFError then, ProtocolError, OSError, StrangerError.
    """
    lender, refusal = reading.lender, _REFUSAL
    if isinstance(lender, Couriers) and not sample_only:
        try:
            await lend_staged(station, lender, connection)
        except LoanError as error:
            lender, refusal = None, str(error)
    while True:
        if lender is None:
            await connection.write(wire.encode(Refused(refusal)))
        else:
            [sample] = station.digests([SINK_PAGE])
            memory = b"" if isinstance(lender, Couriers) else lender.lend()
            await connection.write(wire.encode(Lent(lender.kind.value, host_name(), memory, sample)))
        if not isinstance(wire.decode_from_decode(await connection.receive(wire.MAX_GREETING_BYTES)), Lend):
            raise ProtocolError("it speaks where it borrows")


_REFUSAL = "it does not lend its memory: start it with the same --disaggregation-transfer-backend, or auto for cuda_ipc"
