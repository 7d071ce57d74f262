"""Who may use a worker, and which pairs are used: real workers behind real gateways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.processes import MICRO_MODEL, Gateway, Worker, free_port, wait_for

Start = Callable[..., Gateway]
FAKE = [str(MICRO_MODEL), "--runner", "fake"]


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


def listed(gateway: Gateway) -> dict[str, Any]:
    """What `gateway workers list` shows."""
    return httpx.get(f"{gateway.url}/workers", timeout=10).raise_for_status().json()


def first_worker(gateway: Gateway) -> dict[str, Any]:
    return listed(gateway)["workers"][0]


def answer(gateway: Gateway) -> str:
    with gateway.client() as client:
        return client.completions.create(model="micro", prompt="Hello", max_tokens=4).choices[0].text


def key_file(folder: Path, name: str) -> str:
    (folder / name).write_text(f"a key that nobody guesses: {name}\n")
    return str(folder / name)


def test_a_worker_serves_the_gateways_that_share_its_key(tmp_path: Path, running: ExitStack, start: Start) -> None:
    ours, theirs = key_file(tmp_path, "ours"), key_file(tmp_path, "theirs")
    worker = running.enter_context(Worker(*FAKE, "--worker-key-file", ours))
    gateway = start("--worker", worker.address, "--worker-key-file", ours)
    expected = answer(gateway)
    strangers = [
        running.enter_context(Gateway("--worker", worker.address, *more))
        for more in (["--worker-key-file", theirs], [])
    ]
    wait_for("both are refused", lambda: all(first_worker(gateway)["state"] == "refused" for gateway in strangers))
    for stranger in strangers:
        assert "--worker-key-file" in first_worker(stranger)["reason"]
        assert not stranger.is_ready()
    assert answer(gateway) == expected


def test_a_worker_that_is_started_here_asks_its_own_gateway_too(tmp_path: Path, start: Start) -> None:
    pairs = ["--prefill-workers", "1", "--decode-workers", "1"]
    gateway = start("serve", *FAKE, *pairs, "--worker-key-file", key_file(tmp_path, "ours"))
    assert answer(gateway)


def test_a_pair_whose_pages_do_not_come_takes_no_requests(running: ExitStack) -> None:
    """Both workers are well; what lies between them is not."""
    nowhere = f"127.0.0.1:{free_port()}"
    prefill = running.enter_context(
        Worker(
            *FAKE,
            *("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0"),
            *("--disaggregation-advertise-address", nowhere),
        )
    )
    decode = running.enter_context(Worker(*FAKE, "--disaggregation-mode", "decode"))
    gateway = running.enter_context(Gateway("--prefill", prefill.address, "--decode", decode.address))
    wait_for("a page was tried", lambda: "no page comes" in str(listed(gateway)["unpaired"]))
    [sentence] = listed(gateway)["unpaired"]
    assert sentence.startswith(f"no page comes from {prefill.address} to {decode.address}: ")
    assert {worker["state"] for worker in listed(gateway)["workers"]} == {"ready"}
    assert not gateway.is_ready()
    refused = httpx.post(f"{gateway.url}/v1/completions", json={"model": "micro", "prompt": "Hello"}, timeout=10)
    assert refused.status_code == 503
    assert "no page comes" in refused.json()["error"]["message"]
