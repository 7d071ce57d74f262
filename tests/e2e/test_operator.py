"""What an operator can do to a running stack: keys, aborts, flushing, limits, more than one worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from harness.processes import MICRO_MODEL, Gateway, Worker, serve_arguments, wait_for

MODEL = "micro"
RUNNING = "baleen_worker_running_requests"

Start = Callable[..., Gateway]


def long_stream(client: openai.OpenAI) -> Any:
    """A stream that would go on for minutes, and its first chunk with text."""
    stream = client.completions.create(
        model=MODEL, prompt="Count the waves.", max_tokens=15_000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    return next(chunks), chunks


def test_a_key_guards_the_api_and_leaves_the_probes_open(start: Start) -> None:
    gateway = start(*serve_arguments("fake", "--api-key", "krill"))
    assert httpx.get(f"{gateway.url}/metrics").status_code == 200
    with gateway.client() as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="krill", max_retries=0) as friend:
        assert [model.id for model in friend.models.list()] == [MODEL]
        assert friend.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


@pytest.mark.parametrize("everything", [False, True])
def test_a_request_can_be_ended_from_outside(slow_stack: Gateway, everything: bool) -> None:
    with slow_stack.client() as client:
        first, chunks = long_stream(client)
        body = {"abort_all": True} if everything else {"rid": first.id}
        answer = httpx.post(f"{slow_stack.url}/abort_request", json=body).raise_for_status()
        assert answer.json() == {"aborted": 1}
        *_, last = chunks
    assert last.choices[0].finish_reason == "abort"
    wait_for("its place is free", lambda: slow_stack.metrics()[RUNNING] == 0)
    unknown = httpx.post(f"{slow_stack.url}/abort_request", json={"rid": first.id}).raise_for_status()
    assert unknown.json() == {"aborted": 0}


def test_flushing_waits_for_nobody(slow_stack: Gateway) -> None:
    with slow_stack.client() as client:
        client.completions.create(model=MODEL, prompt=[5] * 200, max_tokens=1)  # leaves three full pages behind
    assert httpx.post(f"{slow_stack.url}/flush_cache").raise_for_status().json()["freed_pages"] >= 3
    assert httpx.post(f"{slow_stack.url}/flush_cache").raise_for_status().json() == {"freed_pages": 0}
    with slow_stack.client() as client:
        _, chunks = long_stream(client)
        refused = httpx.post(f"{slow_stack.url}/flush_cache")
        assert refused.status_code == 409
        assert refused.json()["error"]["message"]
        httpx.post(f"{slow_stack.url}/abort_request", json={"abort_all": True}).raise_for_status()
        list(chunks)


def test_more_requests_than_permits_are_turned_away(start: Start) -> None:
    limits = ["--max-concurrent-requests", "1", "--queue-timeout-s", "1"]
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "20", *limits))
    with gateway.client() as client:
        _, chunks = long_stream(client)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        httpx.post(f"{gateway.url}/abort_request", json={"abort_all": True}).raise_for_status()
        list(chunks)
        assert wait_for("the permit is free", lambda: _completes(client))


def _completes(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices)
    except openai.RateLimitError:
        return False


def test_two_workers_share_the_work_and_cover_for_each_other(start: Start) -> None:
    arguments = (str(MICRO_MODEL), "--runner", "fake", "--fake-step-ms", "20")
    with Worker(*arguments) as first, Worker(*arguments) as second:
        gateway = start("--worker", first.address, "--worker", f"http://{second.address}")
        wait_for("both are ready", lambda: gateway.metrics()["baleen_worker_ready"] == 2)
        with gateway.client() as client:
            streams = [long_stream(client) for _ in range(4)]
            by_worker = wait_for("both have work", lambda: _evenly_spread(gateway))
            assert by_worker == [2.0, 2.0]
            second.close()
            survivors = 0
            httpx.post(f"{gateway.url}/abort_request", json={"abort_all": True}).raise_for_status()
            for _, chunks in streams:
                try:
                    *_, last = chunks
                    survivors += last.choices[0].finish_reason == "abort"
                except openai.APIError:
                    continue
            assert survivors >= 2
            wait_for("the dead one is noticed", lambda: gateway.metrics()["baleen_worker_ready"] == 1)
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def _evenly_spread(gateway: Gateway) -> list[float]:
    text = httpx.get(f"{gateway.url}/metrics").text
    counts = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{RUNNING}{{")]
    return counts if sum(counts) == 4 else []
