"""Two workers with the trained micro model answer as one does: greedy and seeded, constrained, penalised."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core"))

from pair import Pair
from worker_process import MODEL, WorkerProcess

MODEL_FLAGS = ("--runner", "model", "--device", "cpu", "--max-total-tokens", "32768", "--max-running-requests", "16")
SCHEMA = '{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 9}'
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 8},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3, "thinking_budget": 4},
    {"temperature": 1.0, "json_schema": SCHEMA},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
]
LENGTHS = (1, 64, 130, 1000)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
    with (
        WorkerProcess(MODEL, *MODEL_FLAGS, *prefill, "--chunked-prefill-size", "256") as first,
        WorkerProcess(MODEL, *MODEL_FLAGS, "--disaggregation-mode", "decode", "--poison-freed-pages") as second,
    ):
        yield first, second


def prompt_of(length: int) -> list[int]:
    return [(place * 7919 + length) % 1500 + 20 for place in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_answers_are_those_of_one_worker(workers: tuple[WorkerProcess, WorkerProcess], length: int) -> None:
    """The decode worker itself serves whole requests too, after the legs, so that none finds its pages cached."""
    with Pair(*workers) as pair:
        for number, fields in enumerate(REQUESTS):
            pair.ask(100 + number, prompt_of(length), 24, cache_salt=f"{length}-{number}", **fields)
            pair.finish(100 + number)
        stream = pair.decode.stream
        for number, fields in enumerate(REQUESTS):
            _, whole = pair.submits(100 + number, prompt_of(length), 24, cache_salt="whole", **fields)
            whole.key = 200 + number
            whole.ClearField("disaggregation")
            stream.send(submits=[whole])
            stream.read_until(lambda key=whole.key: key in stream.ended)
        assert not stream.errors, stream.errors
        for number in range(len(REQUESTS)):
            assert stream.tokens[100 + number] == stream.tokens[200 + number], REQUESTS[number]
            assert stream.ends[100 + number] == stream.ends[200 + number]
            assert stream.tokens[100 + number]
        assert set(pair.prefill.stream.ends.values()) == {"HANDED_OVER"}
