"""One command serves prefill and decode workers: the same answers as one worker, whatever dies under them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pytest
from harness.processes import ROOT, Gateway, serve_arguments, wait_for

PAIRS = ["--prefill-workers", "2", "--decode-workers", "2"]
NUM_WORKERS = 4
QUESTIONS = ["Tell me about the sea.", "What is 12 plus 30?", "Hello!", "Name three colours. " * 40]


@pytest.fixture(scope="module", params=["fake", pytest.param("model", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> list[str]:
    """Arguments of the runner."""
    return {"fake": ["fake", "--fake-step-ms", "5"], "model": ["model", "--dtype", "float32"]}[request.param]


@pytest.fixture(scope="module")
def pairs(runner: list[str]) -> Iterator[Gateway]:
    with Gateway(*serve_arguments(*runner, *PAIRS)) as gateway:
        gateway.ready()
        wait_for("all workers are ready", lambda: gateway.metrics()["baleen_worker_ready"] == NUM_WORKERS)
        yield gateway


def ask(client: openai.OpenAI, question: str, **sampling: Any) -> list[str]:
    """Texts of two choices, one answer streamed and one not."""
    body: dict[str, Any] = {
        "model": "micro",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "extra_body": {"ignore_eos": True},
    }
    whole: Any = client.chat.completions.create(**body, **sampling)
    streamed = ""
    with client.chat.completions.create(**body, **sampling, stream=True) as stream:
        events: Any = stream
        for chunk in events:
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    return [whole.choices[0].message.content, streamed]


def answers(gateway: Gateway) -> list[list[str]]:
    """Greedy and seeded answers to every question."""
    with gateway.client() as client:
        greedy = [ask(client, question, temperature=0) for question in QUESTIONS]
        return greedy + [ask(client, question, temperature=0.8, seed=7) for question in QUESTIONS]


def heads(gateway: Gateway) -> dict[str, psutil.Process]:
    """First process of each worker, by name."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(gateway.pid).children():
        words = child.cmdline()
        if "--disaggregation-mode" in words:
            mode = words[words.index("--disaggregation-mode") + 1]
            found[f"{mode}-{sum(name.startswith(mode) for name in found)}"] = child
    return found


def test_pairs_answer_as_one_worker_does(pairs: Gateway, runner: list[str], start: Callable[..., Gateway]) -> None:
    expected = answers(start(*serve_arguments(*runner)))
    assert answers(pairs) == expected
    assert all(whole == streamed for whole, streamed in expected)


def test_each_worker_is_killed_in_turn_and_no_request_fails(pairs: Gateway) -> None:
    expected = answers(pairs)
    for name in heads(pairs):
        victim = heads(pairs)[name]
        victim.send_signal(signal.SIGKILL)
        assert answers(pairs) == expected
        wait_for(f"{name} is back", lambda: pairs.metrics()["baleen_worker_ready"] == NUM_WORKERS)


# What clients do: chats, completions, tools, schemas, streams, in the dialects that clients speak.
CLIENT_SUITES = ["test_chat.py", "test_completions.py", "test_clients.py", "test_responses.py", "test_messages.py"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_suites_of_clients_pass_while_workers_are_killed_one_after_another() -> None:
    suites = [str(ROOT / "tests" / "e2e" / name) for name in CLIENT_SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "harness.killed_pairs", *suites]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:]
    [killed] = re.findall(r"^workers killed: (\d+)$", run.stdout, re.MULTILINE)
    assert int(killed) >= NUM_WORKERS, "each was killed at least once"
