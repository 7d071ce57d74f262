"""What the serving and the reading side of one rank share: the transfer's thread and loop, pages, counters, and news.

Owns the event loop, its tasks, staging memory and the pipe that wakes the engine. Knows of no leg.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.transfer.connection import Buffers
from baleen_worker.transfer.digests import digests_in_place
from baleen_worker.transfer.orders import LegNews

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from baleen_worker.step import PageStore
    from baleen_worker.transfer.actions import Report, Timers
    from baleen_worker.transfer.connection import Connection
    from baleen_worker.transfer.messages import Key
    from baleen_worker.transfer.orders import News
    from baleen_worker.transfer.wire import Identity

# Bytes that one read asks for, unless a page is larger: of pages in place, and of those that pass through buffers.
_READ_BYTES = 32 << 20
_STAGED_BYTES = 8 << 20
_MAX_COMPLAINTS = 256

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Since the start. `num_dropped`: connections of strangers, and of peers that break the protocol."""

    num_pages_sent: int = 0
    num_pages_received: int = 0
    num_stale_reads: int = 0
    num_damaged_reads: int = 0
    num_failed: int = 0
    num_dropped: int = 0


class Station:
    """One rank's place in transfers. All methods but `take`, `wait`, `run`, `post` and `close` are the loop's own."""

    def __init__(self, store: PageStore, identity: Identity, timers: Timers, inbox: Sequence[int]) -> None:
        """`wait` looks at the files of `inbox` too."""
        self.store = store
        self.identity = identity
        self.timers = timers
        self.counters = Counters()
        # Of pages on a device; None where hashing their bytes on the host is what there is.
        self.device = store.device
        self.staged_pages = max(_STAGED_BYTES // store.page_bytes, 1)
        in_place = max(_READ_BYTES // store.page_bytes, 1)
        self.pages_per_read = in_place if store.views([SINK_PAGE]) else self.staged_pages
        self.buffers = Buffers(self.staged_pages * store.page_bytes)
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints: set[str] = set()
        self._news: deque[News] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = select.poll()
        for file in (self._wake_read, *inbox):
            self._poller.register(file, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    # --- the engine's side ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Has the loop make this call, after those posted before."""
        self.loop.call_soon_threadsafe(call)

    def take(self) -> list[News]:
        """News since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        news: list[News] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there is news or something to read from the inbox, or the time is over."""
        self._poller.poll(1000 * timeout_s)

    def close(self) -> None:
        """Ends the thread and all its tasks."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- the loop's side --------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until it ends; an error that it dies of is logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def tell(self, key: Key, report: Report) -> None:
        """News of a leg for the engine."""
        self.publish(LegNews(key, report))

    def publish(self, news: News) -> None:
        """News for the engine."""
        self._news.append(news)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def complain(self, connection: Connection | None, reason: str) -> None:
        """Counts a peer that is dropped, and logs each reason once."""
        self.counters.num_dropped += 1
        if reason not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(reason)
            logger.warning("a peer at %s is dropped: %s", "?" if connection is None else connection.name, reason)

    def remark(self, sentence: str) -> None:
        """Logs each sentence once."""
        if sentence not in self._complaints and len(self._complaints) < _MAX_COMPLAINTS:
            self._complaints.add(sentence)
            logger.info(sentence)

    def digests(self, pages: Sequence[int]) -> list[int]:
        """Of each page's bytes, as they are announced. Also called from the thread that copies."""
        if self.device is not None:
            return self.device.digests(pages)
        if views := self.store.views(pages):
            return digests_in_place(views, len(pages))
        of_pages: list[int] = []
        for start in range(0, len(pages), self.pages_per_read):
            part = pages[start : start + self.pages_per_read]
            self.store.read(part, self.buffers.own[: len(part) * self.store.page_bytes])
            of_pages += self.digests_of(self.buffers.own, len(part))
        return of_pages

    def digests_of(self, buffer: memoryview, count: int) -> list[int]:
        """XXH3_64 of the first pages in a buffer."""
        size = self.store.page_bytes
        return [xxh3_64_intdigest(buffer[at * size : (at + 1) * size]) for at in range(count)]

    async def write_pages(self, pages: Sequence[int], connection: Connection) -> None:
        """Sends pages, at most `pages_per_read`."""
        if views := self.store.views(pages):
            await connection.write_views([view.reshape(-1).data for view in views])
            return
        async with self.buffers.take() as buffer:
            staged = buffer[: len(pages) * self.store.page_bytes]
            self.store.read(pages, staged)
            await connection.write(staged)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a transfer fails", exc_info=error)
