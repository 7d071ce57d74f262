"""Answers that must have a form, over HTTP on the micro model: schemas, expressions, and calls that are asked for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from harness.processes import MICRO_MODEL, Gateway, free_port, worker_counters
from harness.script import Line, write_script
from harness.weather import WEATHER, tool

# The first constraint of a worker waits until two processes have imported what compiles it.
TIMEOUT_S = 250


def ask(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """The one choice of a chat request, sampled, so that nothing but the constraint gives it its form."""
    body = {
        "model": "micro",
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 200,
        "seed": 5,
        "thinking": {"type": "disabled"},
    }
    response = httpx.post(f"{gateway.url}/v1/chat/completions", json=body | fields, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check_calls(choice: dict[str, Any], names: set[str]) -> list[str]:
    """Names of the calls; every one is declared and has arguments that obey the schema."""
    calls = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    for call in calls:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
    return [call["function"]["name"] for call in calls]


def test_a_schema_gives_the_answer_its_form(model_stack: Gateway) -> None:
    choice = ask(model_stack, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}})
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), WEATHER)


def test_a_schema_leaves_the_reasoning_free(model_stack: Gateway) -> None:
    choice = ask(
        model_stack,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}},
        thinking={"type": "enabled"},
        thinking_budget=20,
    )
    assert choice["message"]["reasoning_content"]
    jsonschema.validate(json.loads(choice["message"]["content"]), WEATHER)


def test_a_regular_expression_gives_the_answer_its_form(model_stack: Gateway) -> None:
    choice = ask(model_stack, regex="(krill|plankton){2}")
    assert re.fullmatch("(krill|plankton){2}", choice["message"]["content"])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
def test_every_tool_choice_gives_calls_that_parse(model_stack: Gateway, choice: str, parallel: bool, seed: int) -> None:
    tools = [tool("weather", strict=True), tool("forecast", strict=True)]
    named = {"type": "function", "function": {"name": "forecast"}}
    answer = ask(
        model_stack,
        tools=tools,
        tool_choice=named if choice == "named" else choice,
        parallel_tool_calls=parallel,
        seed=seed,
        max_tokens=400,
    )
    if answer["finish_reason"] == "length":
        pytest.fail(f"the answer never ended: {answer['message']}")
    calls = check_calls(answer, {"forecast"} if choice == "named" else {"weather", "forecast"})
    assert calls or choice == "auto"
    assert parallel or len(calls) <= 1


# Few pages for many requests: they make way for each other, and prompts that begin alike are cached.
CROWDED = (
    *("--max-total-tokens", "3072", "--max-running-requests", "16", "--schedule-conservativeness", "0.05"),
    *("--chunked-prefill-size", "128", "--poison-freed-pages"),
)


# What a model says of its own accord where it may choose: some words, and the beginning of a block of calls.
CHATTER = [" ".join(["I shall look"] + ["and look"] * (number * 3) + ["it up."]) for number in range(12)]


def question(number: int) -> str:
    return f"Which weather has the north on day {number}?"


@pytest.fixture(scope="module")
def crowded_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, int]]:
    """A stack on the fake runner, and the port at which its worker tells its counters.

    A question is answered with its words and the beginning of a block; what follows is up to the runner and the masks.
    """
    lines = [Line(question(number), f"{words}\n\n<｜DSML｜function_calls>\n") for number, words in enumerate(CHATTER)]
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", lines)
    port = free_port()
    flags = (*CROWDED, "--fake-script", str(script), "--metrics-port", str(port))
    with Gateway("serve", str(MICRO_MODEL), "--runner", "fake", *flags) as gateway:
        yield gateway.ready(), port


@pytest.mark.parametrize("num_seeds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_every_tool_choice_gives_calls_that_parse_while_requests_make_way(
    crowded_stack: tuple[Gateway, int], num_seeds: int
) -> None:
    gateway, port = crowded_stack
    before = worker_counters(port)
    tools = [tool("weather", strict=True), tool("forecast", strict=True)]
    named = {"type": "function", "function": {"name": "forecast"}}
    cases = list(itertools.product(("required", "named", "auto"), (True, False), range(num_seeds)))

    def num_calls(choice: str, parallel: bool, seed: int) -> int:
        number = seed % len(CHATTER)
        asked = question(number) if choice == "auto" else f"Tell me of the weather, {seed} times."
        found = ask(
            gateway,
            messages=[
                {"role": "system", "content": "You know the weather in the north. " * 10},
                {"role": "user", "content": asked},
            ],
            tools=tools,
            tool_choice=named if choice == "named" else choice,
            parallel_tool_calls=parallel,
            seed=seed,
            max_tokens=600,
        )
        if choice == "auto":
            assert found["message"]["content"] == CHATTER[number]
        if found["finish_reason"] == "length" and parallel:
            return 0  # the fake runner has no wish to end, and another call may always follow
        calls = check_calls(found, {"forecast"} if choice == "named" else {"weather", "forecast"})
        assert len(calls) == 1 or (parallel and calls)
        return len(calls)

    with ThreadPoolExecutor(36) as pool:
        found = [future.result() for future in [pool.submit(num_calls, *case) for case in cases]]
    assert sum(found) >= len(cases)
    told = worker_counters(port)
    for counter in ("baleen_worker_preemptions_total", "baleen_worker_cached_tokens_total"):
        assert told[counter] > before[counter]


def test_a_schema_that_cannot_be_compiled_is_refused_with_the_cause(model_stack: Gateway) -> None:
    body = {"model": "micro", "messages": [{"role": "user", "content": "x"}], "regex": "(a"}
    refused = httpx.post(f"{model_stack.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    assert refused.status_code == 400
    assert "regex" in refused.json()["error"]["message"]
