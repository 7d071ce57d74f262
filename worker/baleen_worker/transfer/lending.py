"""Ways for a decode worker to take a prefill worker's pages past the connections of legs.

The prefill side lends its memory once to a peer that it has greeted; the decode side borrows it, copies pages out of it
into its own, and then asks what they were worth (`Took`). Who may and when is not decided here. Owns no memory and no
thread. Pages are read where they are (`cuda_ipc.py`, and another way of tests) or staged and fetched (`staged.py`).
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baleen_worker.step import Region

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from baleen_worker.transfer.messages import FromPrefill


class Backend(enum.Enum):
    """How pages travel. `AUTO`: read from lent memory where that is possible, else over the connection."""

    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"
    NIXL = "nixl"
    AUTO = "auto"


class LoanError(Exception):
    """Memory cannot be lent, or that of a peer cannot be read; the message says why."""


class Borrowed(Protocol):
    """Memory of one peer, readable from here. Valid until `close`, whatever becomes of the peer."""

    num_pages: int

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        """Starts to fill own pages; returns what waits for the last byte and then has their digests. Pages exist.

        Fills are done in the order in which they were started. Raises LoanError, and so does what it returns.
        """
        ...

    def touch(self) -> Callable[[], object]:
        """Reads a little and keeps nothing of it: the way there stays awake. As `fill`, but digests are of no use."""
        ...

    def close(self) -> None:
        """No page is read any more."""
        ...


class Lender(Protocol):
    """One rank's memory, and how it reads that of others."""

    kind: Backend
    start_s: float  # that a peer may take until it lends

    def lend(self) -> bytes:
        """What a peer needs in order to borrow; the same for every peer. Raises LoanError."""
        ...

    def borrow(self, lent: bytes) -> Borrowed:
        """The other end of `lend`. Raises LoanError for what is not laid out like own pages or cannot be reached."""
        ...


class Loan(Protocol):
    """One peer's memory, while its connection lasts."""

    pages_per_read: int

    def used(self) -> AbstractContextManager[None]:
        """Within, somebody may copy at any moment."""
        ...

    def fill(self, theirs: Sequence[int], ours: Sequence[int]) -> asyncio.Future[list[int]]:
        """Starts to fill own pages; their digests come with its end, or LoanError, or ConnectionError.

        Raises LoanError, and ConnectionError once the loan is over.
        """
        ...

    def hear(self, message: FromPrefill) -> None:
        """The peer has said something on the loan's connection. Raises ProtocolError."""
        ...

    def end(self) -> None:
        """Nothing is copied any more, but what is under way."""
        ...


def check_regions(own: Sequence[Region], theirs: Sequence[Region]) -> None:
    """Whether pages of one are pages of the other. Raises LoanError."""
    if [region.page_bytes for region in own] != [region.page_bytes for region in theirs]:
        raise LoanError("its memory is laid out in another way")


@lru_cache
def host_name() -> str:
    """Names this start of this machine, whatever container asks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux
        return ""
