"""The settable clock: processes see it jump, and their monotonic clocks do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from chaos.clock import Clock

HOUR_S = 3600.0
# Answers each line with both clocks.
PROGRAM = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


def test_a_running_process_sees_its_clock_jump(clock: Clock) -> None:
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | clock.environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead_s in (0.0, HOUR_S, -HOUR_S, 0.0):
            clock.set(ahead_s)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            assert abs(wall - time.time() - ahead_s) < 60
            assert abs(monotonic - time.monotonic()) < 60
        process.stdin.close()
