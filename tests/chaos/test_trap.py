"""Traps spring once, at their phase, and break frames as they say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from baleen_worker.pb import worker_pb2 as pb
from chaos.rank import PHASES
from chaos.trap import Order, Trap
from chaos.worker import FRAME_ACTIONS, FRAME_BACK, trapped


def test_an_order_is_carried_out_once_at_its_phase_after_so_many(tmp_path: Path) -> None:
    schedule, worker = Trap(tmp_path), Trap(tmp_path)
    assert worker.springs("reserved") is None
    schedule.set(Order("reserved", "kill", skip=2))
    passed = [worker.springs(phase) for phase in ("reserved", "serving", "reserved", "reserved", "reserved")]
    assert passed == [None, None, None, "kill", None]
    assert schedule.sprang
    schedule.set(Order("reserved", "stop"))
    assert not schedule.sprang
    schedule.clear()
    assert worker.springs("reserved") is None


def test_every_phase_is_a_place_in_the_worker() -> None:
    assert all(callable(getattr(owner, name)) for owner, name, _ in PHASES.values())


@pytest.mark.parametrize(
    ("action", "written"),
    [("drop", [1, 3, 4]), ("duplicate", [1, 2, 2, 3, 4]), ("swap", [1, 3, 2, 4]), ("none", [1, 2, 3, 4])],
)
def test_a_frame_is_broken_as_told(tmp_path: Path, action: str, written: list[int]) -> None:
    assert action == "none" or action in FRAME_ACTIONS
    trap = Trap(tmp_path)
    trap.set(Order(FRAME_BACK, action))
    found: list[int] = []

    async def write(frame: pb.WorkerFrame) -> None:
        found.append(frame.sequence)

    async def run() -> None:
        broken = trapped(write, trap, FRAME_BACK)
        for sequence in range(1, 5):
            await broken(pb.WorkerFrame(sequence=sequence))

    asyncio.run(run())
    assert found == written
