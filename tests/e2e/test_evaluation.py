"""A short evaluation of the micro model, over HTTP as anybody would run it: the gate for whatever touches the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import Gateway

# A busy machine computes a prompt of 2K tokens for minutes.
pytestmark = pytest.mark.timeout(1200)

# Suite, arguments, and the share that has to be right. The model has 0.98 or more of each (models/micro/README.md).
SHORT = [
    ("needle", ["--num", "3", "--lengths", "512", "2048"], 0.8),
    ("tools", ["--num", "6"], 0.8),
    ("arith", ["--num", "10"], 0.9),
]


@pytest.mark.parametrize(("suite", "arguments", "bar"), SHORT, ids=[suite for suite, *_ in SHORT])
def test_the_micro_model_answers(
    model_stack: Gateway, tmp_path: Path, suite: str, arguments: list[str], bar: float
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "baleen_eval", "--base-url", model_stack.url, "--suite", suite, *arguments]
    subprocess.run([*command, "--seed", "7", "--parallel", "4", "--json", str(out)], check=True)
    result = json.loads(out.read_text("utf-8"))
    assert result["transport_errors"] == 0
    assert result["accuracy"] >= bar, result["mistakes"]
