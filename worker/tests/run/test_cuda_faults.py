"""A device that fails under a real worker: it says what it was doing and ends, and its stream with it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core"))

from harness.struck import FAULT_TOKEN, struck
from worker_process import Client, WorkerProcess

pytestmark = pytest.mark.gpu

MICRO = Path(__file__).parents[3] / "models" / "micro"
FLAGS = (
    *("--runner", "model", "--device", "cuda", "--max-total-tokens", "16384", "--max-running-requests", "8"),
    *("--mem-fraction-static", "0.3", "--watchdog-timeout", "3", "--cuda-graph-bs", "1", "4", "8"),
)


LOST = "the device is lost: CUDA error: an illegal memory access"
ENDED = "the rank process died"  # a library met the error first, and did not come back to Python
HANGS = "did not end within 3 s (--watchdog-timeout): the device hangs"


@pytest.mark.parametrize(("fault", "sentences"), [("illegal access", (LOST, ENDED)), ("endless kernel", (HANGS,))])
def test_a_device_that_fails_ends_its_worker(tmp_path: Path, fault: str, sentences: tuple[str, ...]) -> None:
    with WorkerProcess(MICRO, *FLAGS, environment=struck(fault, tmp_path / "mark")) as worker:
        with Client(worker.address) as client:
            stream = client.connect()
            stream.submit(1, [5, 6, 7], 4, temperature=0.0)
            stream.read_until(lambda: 1 in stream.ends)
            stream.submit(2, [9, 9], 400, temperature=0.0)
            stream.read_until(lambda: 2 in stream.tokens)
            stream.submit(3, [FAULT_TOKEN, 7], 4)
            started_s = time.monotonic()
            assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE
            details = stream.call.details()
            print(f"{fault}: {time.monotonic() - started_s:.2f} s after the request that is struck: {details}")
            assert any(sentence in details for sentence in sentences)
        assert worker.wait() == 1
        said = "".join(worker.errors)
        print(said)
    if ENDED in details:
        assert "Fatal Python error" in said or "Timeout (" in said
        return
    assert "computed with arithmetic:fused" in said
    assert "before that, step" in said
    if fault == "endless kernel":
        assert "is in flight" in said
