"""A courier without a library: reads a peer's staging memory through the file that it is in. Fails as a file says.

What the folder's `fault` says is done at each read: `hang`, `fail` or `die`; nothing where there is none.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from pathlib import Path

from baleen_worker.transfer.nixl_process import Fetch, Ready, run


class StandIn:
    """The `Agent`. Addresses count from the beginning of staging memory, and from 4096, as 0 is no address."""

    first = 4096

    def __init__(self) -> None:
        self._memory = mmap.mmap(int(sys.argv[-2]), 0)
        self._peer: mmap.mmap | None = None

    def start(self) -> Ready:
        return Ready(f"/proc/{os.getpid()}/fd/{sys.argv[-2]}".encode(), self.first)

    def reach(self, where: bytes) -> None:
        with Path(os.fsdecode(where)).open("r+b") as file:
            self._peer = mmap.mmap(file.fileno(), 0)

    def fetch(self, order: Fetch) -> None:
        fault = Path(sys.argv[1], "fault")
        match fault.read_text() if fault.exists() else "":
            case "hang":
                signal.pause()
            case "fail":
                raise OSError("a read ends with ERR")
            case "die":
                os.abort()
            case _:
                assert self._peer is not None, "it was not told whom to read from"
                at = order.address - self.first
                self._memory[order.offset : order.offset + order.num_bytes] = self._peer[at : at + order.num_bytes]


if __name__ == "__main__":
    run(sys.argv[2:], lambda *_: StandIn())
