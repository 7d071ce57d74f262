"""Requests that the engine cannot serve, on the micro model over HTTP: the reason, and nothing left behind."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from harness.processes import Gateway

# The first constraint of a worker waits until two processes have imported what compiles it.
TIMEOUT_S = 250

# (name, fields, field at fault, words of the reason)
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("a schema nothing obeys", {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json", ""),
    ("an enumeration of nothing", {"guided_json": {"enum": []}}, "guided_json", ""),
    ("an over-large schema", {"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "bytes"),
    ("two rules on the text", {"regex": "a+", "guided_choice": ["a"]}, "guided_choice", ""),
    ("a grammar that allows nothing", {"ebnf": "root ::= root"}, "ebnf", ""),
    ("a bias on an unknown token", {"logit_bias": {"2048": 1}}, "logit_bias", "2048"),
    ("a bias on no token", {"logit_bias": {"krill": 1}}, "logit_bias", "krill"),
    ("a priority too high", {"priority": 1001}, "priority", "1000"),
    ("a priority too low", {"priority": -1001}, "priority", "-1000"),
]


def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    body = {"model": "micro", "prompt": "Hello", "max_tokens": 4, "temperature": 0} | fields
    return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=TIMEOUT_S)


@pytest.mark.parametrize(("fields", "field", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_is_refused_with_the_reason_and_nothing_is_queued(
    model_stack: Gateway, fields: dict[str, Any], field: str, words: str
) -> None:
    response = ask(model_stack, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or "") or field in error["message"], error
    assert words in error["message"], error
    model_stack.wait_until_idle()


def test_a_grammar_that_leads_nowhere_ends_its_answer(model_stack: Gateway) -> None:
    """Nothing may follow the first letter, not even an end: the answer is cut short as by its length."""
    choice = ask(model_stack, ebnf='root ::= "a" never\nnever ::= "b" never', max_tokens=8).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == "a" + "b" * (len(choice["text"]) - 1)
    model_stack.wait_until_idle()


def test_a_plugin_that_raises_ends_only_its_request(model_stack: Gateway) -> None:
    """Its neighbours in the same steps get what they would have got alone."""
    alone = ask(model_stack, max_tokens=40).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(ask, model_stack, max_tokens=40) for _ in range(4)]
        broken = [pool.submit(ask, model_stack, logit_processors=["breaks"]) for _ in range(4)]
    for response in (future.result() for future in broken):
        assert response.status_code == 500, response.text
        assert "breaks" in json.dumps(response.json()["error"])
    assert [future.result().json()["choices"] for future in neighbours] == [alone] * 4
    model_stack.wait_until_idle()
