"""Requests find the worker that has computed their beginning: real workers, real caches, the events between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from harness.processes import MICRO_MODEL, Gateway, Worker, wait_for

Start = Callable[..., Gateway]
NUM_WORKERS = 3
SYSTEM_PROMPTS = ["tide table", "harbour rules", "cargo list", "weather log", "crew roster", "fuel report"]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """For all tests of this file; the last one ends one of them."""
    with ExitStack() as running:
        yield [running.enter_context(Worker(str(MICRO_MODEL), "--runner", "fake")) for _ in range(NUM_WORKERS)]


def front(start: Start, workers: list[Worker], *flags: str) -> Gateway:
    addresses = [word for worker in workers for word in ("--worker", worker.address)]
    gateway = start(*addresses, *flags)
    wait_for("all are ready", lambda: gateway.metrics()["baleen_worker_ready"] == NUM_WORKERS)
    return gateway


def front_anew(start: Start, workers: list[Worker], *flags: str) -> Gateway:
    """The same, and nothing is cached of an earlier test."""
    gateway = front(start, workers, *flags)
    httpx.post(f"{gateway.url}/flush_cache", timeout=10).raise_for_status()
    return gateway


def cached_share(gateway: Gateway, system_prompt: str, question: str, **extra: Any) -> float:
    """Share of the prompt that the worker found in its cache; `extra` goes with the request."""
    messages: list[Any] = [{"role": "system", "content": system_prompt * 150}, {"role": "user", "content": question}]
    with gateway.client() as client:
        usage: Any = client.chat.completions.create(model="micro", messages=messages, max_tokens=2, **extra).usage
    return usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens


def test_later_requests_go_where_their_beginning_is_cached(start: Start, workers: list[Worker]) -> None:
    gateway = front_anew(start, workers)
    for system_prompt in SYSTEM_PROMPTS:
        assert cached_share(gateway, system_prompt, "What is first?") == 0.0
    for question in ("What is next?", "What is last?"):
        for system_prompt in reversed(SYSTEM_PROMPTS):
            assert cached_share(gateway, system_prompt, question) > 0.8

    # A gateway that comes later is told what is cached.
    second = front(start, workers)
    for system_prompt in SYSTEM_PROMPTS:
        assert cached_share(second, system_prompt, "Anything else?") > 0.8


def test_round_robin_pays_for_what_it_does_not_know(start: Start, workers: list[Worker]) -> None:
    gateway = front_anew(start, workers, "--policy", "round_robin")
    shares = [cached_share(gateway, SYSTEM_PROMPTS[0], f"Question {number}?") for number in range(2 * NUM_WORKERS)]
    assert shares[:NUM_WORKERS] == [0.0] * NUM_WORKERS
    assert min(shares[NUM_WORKERS:]) > 0.8


def test_equal_beginnings_share_a_worker_by_their_hash(start: Start, workers: list[Worker]) -> None:
    gateway = front_anew(start, workers, "--policy", "prefix_hash")
    for system_prompt in SYSTEM_PROMPTS:
        assert cached_share(gateway, system_prompt, "What is first?") == 0.0
        assert cached_share(gateway, system_prompt, "What is next?") > 0.8


def test_a_session_keeps_its_worker_and_moves_when_that_is_lost(start: Start, workers: list[Worker]) -> None:
    gateway = front_anew(start, workers, "--policy", "consistent_hashing")
    # So many that each worker has some of them, whatever the addresses are.
    names = [f"session {number}" for number in range(30)]

    def share(name: str, **extra: Any) -> float:
        """Of a prompt that this session alone has."""
        return cached_share(gateway, f"{name} {SYSTEM_PROMPTS[0]}", "What is next?", **extra)

    for name in names:
        assert share(name, extra_headers={"x-session-id": name}) == 0.0
    for name in names[:6]:
        assert share(name, extra_headers={"x-smg-routing-key": name}, user="somebody else") > 0.8
        assert share(name, extra_body={"prompt_cache_key": name}, user="somebody else") > 0.8
        assert share(name, user=name) > 0.8

    workers[0].close()
    wait_for("it is missed", lambda: gateway.metrics()["baleen_worker_ready"] == NUM_WORKERS - 1)
    moved = [name for name in names if share(name, user=name) == 0.0]
    assert 0 < len(moved) < len(names), "those of the lost worker move, and no others"
    assert all(share(name, user=name) > 0.8 for name in names)
