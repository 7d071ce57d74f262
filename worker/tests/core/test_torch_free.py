"""The pure core works where torch cannot be imported: in a process whose import system refuses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).resolve().parents[2]

PROGRAM = """
import importlib.abc, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is imported by the pure core")

sys.meta_path.insert(0, NoTorch())
IMPORTS
USE
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
"""

CORE = (
    "request",
    "output",
    "step",
    "sequence",
    "residency",
    "cache.pages",
    "scheduler",
    "messages",
    "fake_runner",
    "engine",
    "grammar.guide",
    "grammar.room",
    "grammar.trial",
    "limits",
    "config",
    "launch_flags",
    "logit_processors",
    "model_config",
    "streams",
    "server",
    "vocabulary",
    "wire",
    "metrics",
    "rank",
    "head",
)

USE = """
from baleen_worker.cache.pages import PagePool
from baleen_worker.fake_runner import FakeRunner, expected_tokens
from baleen_worker.request import Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits

scheduler = Scheduler(SchedulerLimits(2, 64, 8), PagePool(9))
runner = FakeRunner(9, 100)
scheduler.add(Request((0, 1), [1, 2, 3], SamplingParams(max_tokens=70, seed=0)), 0.0)
tokens = []
while plan := scheduler.plan():
    for output in scheduler.commit(plan, runner.launch(plan).collect()):
        tokens += output.token_ids
assert tokens == expected_tokens([1, 2, 3], 70, 100)
"""


def run_without_torch(imports: str, use: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("IMPORTS", imports).replace("USE", use)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=WORKER, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_core_and_the_head_run_without_torch() -> None:
    imports = "\n".join(f"import baleen_worker.{name}" for name in CORE)
    done = run_without_torch(imports, USE)
    assert done.returncode == 0, done.stderr


def test_the_block_is_real() -> None:
    done = run_without_torch("import torch", "")
    assert done.returncode != 0
    assert "torch is imported by the pure core" in done.stderr
