"""A worker with traps, for schedules that break it at a certain moment: python -m chaos.worker MODEL_DIR ...

The same command line and the same code as `python -m baleen_worker`. Its rank is `rank.py`; its stream loses, repeats,
swaps and delays frames when told to, or stands still with the whole loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from baleen_worker import __main__ as entry
from baleen_worker.pb import worker_pb2 as pb
from baleen_worker.streams import Stream
from chaos.trap import STALL_S, Trap, own_trap

FRAME_THERE, FRAME_BACK = "frame-there", "frame-back"
FRAME_ACTIONS = ("drop", "duplicate", "swap", "delay")
DELAY_S = 3.0

Write = Callable[[Any], Awaitable[None]]


def trapped(write: Write, trap: Trap, phase: str) -> Write:
    """Writes frames as told. The greeting is left alone: there is no stream before it."""
    held: list[Any] = []

    async def broken(frame: Any) -> None:
        match trap.springs(phase) if frame.sequence > 1 else None:
            case "drop":
                return
            case "duplicate":
                await write(frame)
            case "swap":
                held.append(frame)
                return
            case "delay":
                await asyncio.sleep(DELAY_S)
            case "stall":
                time.sleep(STALL_S)
            case _:
                pass
        await write(frame)
        while held:
            await write(held.pop())

    return broken


def set_traps(trap: Trap) -> None:
    """Puts traps on both directions of every stream, and has ranks start with theirs."""
    serve, start = Stream.serve, asyncio.create_subprocess_exec

    async def trapped_serve(
        self: Stream,
        frames: AsyncIterator[pb.GatewayFrame],
        write: Callable[[pb.WorkerFrame], Awaitable[None]],
        handle: Callable[[pb.GatewayFrame], Awaitable[None]],
    ) -> None:
        await serve(self, _read_through(frames, trap), trapped(write, trap, FRAME_BACK), handle)

    async def start_trapped(program: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        theirs = ["chaos.rank" if argument == "baleen_worker.rank" else argument for argument in arguments]
        assert theirs != [*arguments], f"a process is started that is no rank: {arguments}"
        return await start(program, *theirs, **options)

    Stream.serve = trapped_serve
    asyncio.create_subprocess_exec = start_trapped


async def _read_through(frames: AsyncIterator[pb.GatewayFrame], trap: Trap) -> AsyncIterator[pb.GatewayFrame]:
    passed: list[pb.GatewayFrame] = []

    async def keep(frame: pb.GatewayFrame) -> None:
        passed.append(frame)

    write = trapped(keep, trap, FRAME_THERE)
    async for frame in frames:
        await write(frame)
        while passed:
            yield passed.pop(0)


if __name__ == "__main__":
    set_traps(own_trap())
    sys.exit(entry.main())
