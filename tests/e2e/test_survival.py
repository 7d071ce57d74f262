"""Workers are killed under streams, and the streams go on: real workers, real signals, the unmodified client."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from baleen_worker.fake_runner import expected_tokens
from harness.processes import CAPACITY, MICRO_MODEL, Gateway, Worker, wait_for
from harness.struck import FAULT_TOKEN, struck

Start = Callable[..., Gateway]
RUNNERS = {"fake": ["--runner", "fake", "--fake-step-ms", "20"], "model": ["--runner", "model", "--dtype", "float32"]}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    # What came before the death counts for what comes after it; the fake runner has no logits to change.
    "penalised": {"temperature": 0.9, "seed": 12, "frequency_penalty": 0.4},
}
QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the sea, the wind and the stars."}]


@contextmanager
def two_workers(runner: str) -> Iterator[list[Worker]]:
    with ExitStack() as running:
        arguments = [str(MICRO_MODEL), *RUNNERS[runner], *CAPACITY]
        yield [running.enter_context(Worker(*arguments)) for _ in range(2)]


def front(start: Start, workers: list[Worker]) -> Gateway:
    gateway = start(*[word for worker in workers for word in ("--worker", worker.address)])
    wait_for("both are ready", lambda: gateway.metrics()["baleen_worker_ready"] == len(workers))
    return gateway


def busy_worker(gateway: Gateway, workers: list[Worker]) -> Worker:
    """The one that has the request."""
    listed = httpx.get(f"{gateway.url}/workers", timeout=10).raise_for_status().json()["workers"]
    name = next(worker["name"] for worker in listed if worker["load"]["requests_of_this_gateway"])
    return next(worker for worker in workers if worker.address == name)


def answer(
    gateway: Gateway, sampling: dict[str, Any], after_chunks: int = 0, act: Callable[[], None] | None = None
) -> str:
    """The streamed answer; `act` is called once so many pieces of it have come."""
    text: list[str] = []
    with gateway.client() as client:
        stream: Any = client.chat.completions.create(
            model="micro",
            messages=QUESTION,
            max_tokens=200,  # some seconds, of which a busy machine may let one pass before `act` is called
            stream=True,
            extra_body={"ignore_eos": True},
            **sampling,
        )
        with stream:
            for chunk in stream:
                text += [choice.delta.content or "" for choice in chunk.choices]
                if act is not None and len(text) == after_chunks:
                    act()
    return "".join(text)


@pytest.mark.parametrize(
    ("runner", "how"),
    [
        ("fake", "seeded"),
        pytest.param("fake", "greedy", marks=pytest.mark.slow),
        *[pytest.param("model", how, marks=pytest.mark.slow) for how in SAMPLING],
    ],
)
def test_an_answer_is_the_same_when_its_worker_is_killed(start: Start, runner: str, how: str) -> None:
    sampling = SAMPLING[how]
    with two_workers(runner) as workers:
        gateway = front(start, workers)
        undisturbed = answer(gateway, sampling)
        assert undisturbed

        def kill() -> None:
            busy_worker(gateway, workers).signal_group(signal.SIGKILL)

        assert answer(gateway, sampling, 12, kill) == undisturbed
        metrics = gateway.metrics()
        assert metrics["baleen_request_replays_total"] == 1
        assert metrics["baleen_worker_ready"] == 1


def test_a_stopped_worker_is_a_pause(start: Start) -> None:
    with two_workers("fake") as workers:
        gateway = front(start, workers)
        undisturbed = answer(gateway, SAMPLING["greedy"])

        def stop() -> None:
            busy_worker(gateway, workers).signal_group(signal.SIGSTOP)

        assert answer(gateway, SAMPLING["greedy"], 12, stop) == undisturbed


def test_a_rank_that_hangs_behind_a_lively_head_is_a_pause(start: Start) -> None:
    with two_workers("fake") as workers:
        gateway = front(start, workers)
        undisturbed = answer(gateway, SAMPLING["greedy"])

        def stop_rank() -> None:
            busy = busy_worker(gateway, workers)
            rank = next(process for process in busy.family() if "baleen_worker.rank" in process.cmdline())
            rank.suspend()

        assert answer(gateway, SAMPLING["greedy"], 12, stop_rank) == undisturbed


@pytest.mark.parametrize("fault", ["hang", "raise"])
def test_an_answer_goes_on_elsewhere_when_a_device_fails(start: Start, tmp_path: Path, fault: str) -> None:
    """Whichever of the two gets the request is struck; the other one answers it."""
    flags = [str(MICRO_MODEL), *RUNNERS["fake"], *CAPACITY, "--watchdog-timeout", "1"]
    mark = tmp_path / "mark"
    with ExitStack() as running:
        workers = [running.enter_context(Worker(*flags, env=struck(fault, mark))) for _ in range(2)]
        gateway = front(start, workers)
        prompt = [FAULT_TOKEN, 8, 9]
        body = {"model": "micro", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=120).raise_for_status()
        assert mark.exists()
        assert response.json()["choices"][0]["token_ids"] == expected_tokens(prompt, 20, 2048, avoid_ids=(1,))
        wait_for("one has ended", lambda: [worker.process.poll() for worker in workers].count(None) == 1)
