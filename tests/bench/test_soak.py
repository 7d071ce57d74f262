"""What a soak has written down when it is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import report
import soak
from soak_load import Tally


class LoadedGateway:
    """This process, at which three requests wait and two are computed."""

    def family(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def metrics(self) -> dict[str, float]:
        return {"baleen_worker_waiting_requests": 3.0, "baleen_worker_running_requests": 2.0}


class EndlessCrowd:
    """One answer at once, and a wrong one; nothing else ever comes."""

    def __init__(self) -> None:
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        self.tally.done["plain"] += 1
        self.tally.wrong.append("plain: other tokens")
        await asyncio.sleep(seconds)


def test_a_soak_that_does_not_end_has_written_down_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(soak, "SAMPLE_S", 0.01)
    monkeypatch.setattr(soak, "SAMPLES_A_NOTE", 3)

    async def cut_short() -> dict[str, Any]:
        course = asyncio.create_task(soak.soak(cast("Any", LoadedGateway()), cast("Any", EndlessCrowd()), 30))
        while not (found := list(tmp_path.glob("*/soak.json"))):
            assert not course.done(), course.result()
            await asyncio.sleep(0.01)
        course.cancel()
        return json.loads(found[0].read_text("utf-8"))

    written = asyncio.run(cut_short())
    seen = written["measurements"]
    assert not seen["finished"]
    assert (seen["requests"], seen["wrong_answers"], seen["wrong"]) == ({"plain": 1}, 1, ["plain: other tokens"])
    assert seen["samples"][0]["rss_mib"]["gateway"] > 0
    assert seen["mean_waiting_requests"] == 3
    assert (seen["waiting_requests"][0], seen["running_requests"][0]) == (3, 2)
    assert written["bars"] == [], "what is not finished is held to nothing"
