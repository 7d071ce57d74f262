"""Workers of the version before and the version after serve beside this one: what a rolling upgrade goes through."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from harness.processes import CAPACITY, MICRO_MODEL, ROOT, Gateway, Process, wait_for

PAIR = {
    "prefill": ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0"],
    "decode": ["--disaggregation-mode", "decode"],
    "worker": [],
}
QUESTIONS = ["Hello!", "Tell me about the sea.", "Count to three. " * 60]

Start = Callable[..., Gateway]
StartWorker = Callable[..., Process]


@pytest.fixture
def worker_of() -> Iterator[StartWorker]:
    """Starts a worker of some age ("newer", "older" or "this") and role."""
    with ExitStack() as running:

        def start_worker(age: str, role: str = "worker") -> Process:
            program = ["baleen_worker"] if age == "this" else ["harness.other_version", age]
            arguments = ["--runner", "fake", "--fake-step-ms", "5", *CAPACITY, *PAIR[role], "--port", "0"]
            command = [sys.executable, "-m", *program, str(MICRO_MODEL), *arguments]
            return running.enter_context(Process(command, env={"PYTHONPATH": str(ROOT / "tests")}))

        yield start_worker


def front(start: Start, **workers: list[Process]) -> Gateway:
    """A gateway before workers of these roles, all of them ready."""
    given = [(role, worker) for role, some in workers.items() for worker in some]
    gateway = start(*[word for role, worker in given for word in (f"--{role}", f"127.0.0.1:{worker.listening_port()}")])
    wait_for("all are ready", lambda: gateway.metrics()["baleen_worker_ready"] == len(given))
    return gateway


def answers(gateway: Gateway) -> list[Any]:
    """To every question, whole and streamed, with what takes an ability of the worker left out."""
    found: list[Any] = []
    with gateway.client() as client:
        for question in QUESTIONS:
            found.append(ask(client, question))
            scored: Any = client.completions.create(model="micro", prompt=question, max_tokens=8, logprobs=2, seed=3)
            found.append((scored.choices[0].text, scored.choices[0].logprobs.tokens))
    return found


def ask(client: openai.OpenAI, question: str) -> tuple[str, str]:
    body: dict[str, Any] = {
        "model": "micro",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    whole: Any = client.chat.completions.create(**body)
    with client.chat.completions.create(**body, stream=True) as stream:
        events: Any = stream
        streamed = "".join(choice.delta.content or "" for chunk in events for choice in chunk.choices)
    return whole.choices[0].message.content, streamed


@pytest.mark.parametrize("age", ["newer", "older"])
def test_a_worker_of_another_version_serves(
    start: Start, worker_of: StartWorker, fake_stack: Gateway, age: str
) -> None:
    gateway = front(start, worker=[worker_of(age)])
    assert answers(gateway) == answers(fake_stack)
    assert all(whole == streamed for whole, streamed in answers(gateway)[::2])


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("newer", "older"), ("older", "newer"), pytest.param("this", "newer", marks=pytest.mark.slow)],
)
def test_pairs_of_two_versions_serve(
    start: Start, worker_of: StartWorker, fake_stack: Gateway, prefill: str, decode: str
) -> None:
    gateway = front(start, prefill=[worker_of(prefill, "prefill")], decode=[worker_of(decode, "decode")])
    assert answers(gateway) == answers(fake_stack)


def test_an_upgrade_from_one_version_to_the_next_fails_no_request(start: Start, worker_of: StartWorker) -> None:
    old, this = worker_of("older"), worker_of("this")
    gateway = front(start, worker=[old, this])
    wanted = answers(gateway)
    new = worker_of("newer")
    added = httpx.post(f"{gateway.url}/workers", json={"url": f"127.0.0.1:{new.listening_port()}"}, timeout=30)
    assert added.is_success, added.text
    wait_for("the new one is ready", lambda: gateway.metrics()["baleen_worker_ready"] == 3)
    found: list[list[Any]] = []
    clients = [threading.Thread(target=lambda: found.append(answers(gateway))) for _ in range(6)]
    for client in clients:
        client.start()
    for leaving in (old, this):
        leaving.signal(signal.SIGTERM)
        leaving.wait()
    for client in clients:
        client.join()
    assert found == [wanted] * len(clients)
    listed = httpx.get(f"{gateway.url}/workers", timeout=10).raise_for_status().json()["workers"]
    assert [worker["name"] for worker in listed if worker["state"] == "ready"] == [added.json()["name"]]
