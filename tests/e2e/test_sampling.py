"""Sampling parameters beyond temperature do what they say, over HTTP and on the micro model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.processes import MICRO_MODEL, Gateway
from tokenizers import Tokenizer

PROMPT = "The whale opened its mouth and the sea went in."
EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO_MODEL / "tokenizer.json"))


def post(gateway: Gateway, path: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "micro", "temperature": 0, "max_tokens": 12} | fields
    response = httpx.post(f"{gateway.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def complete(gateway: Gateway, **fields: Any) -> str:
    return post(gateway, "/v1/completions", **({"prompt": PROMPT} | fields))["choices"][0]["text"]


def test_a_bias_decides(model_stack: Gateway, tokenizer: Tokenizer) -> None:
    (wanted,) = tokenizer.encode(" a", add_special_tokens=False).ids
    assert complete(model_stack, logit_bias={str(wanted): 100}) == " a" * 12


def test_penalties_break_a_repetition(model_stack: Gateway, tokenizer: Tokenizer) -> None:
    """Two tokens whose biases differ little: the likelier one repeats until its penalty exceeds the difference."""
    (first,) = tokenizer.encode(" a", add_special_tokens=False).ids
    (second,) = tokenizer.encode(" b", add_special_tokens=False).ids
    bias = {"logit_bias": {str(first): 100, str(second): 100}}
    plain = complete(model_stack, **bias)
    other = complete(model_stack, **bias, presence_penalty=2)
    assert set(plain.split()) <= {"a", "b"}
    assert plain != other or set(other.split()) == {"a", "b"}
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2, "frequency_penalty": 1}):
        text = complete(model_stack, **bias, **penalty, max_tokens=40)
        assert {"a", "b"} == set(text.split()), "one token is said for ever, whatever its penalty"


def test_min_tokens_keeps_an_answer_going(model_stack: Gateway) -> None:
    ends = post(model_stack, "/v1/completions", prompt=PROMPT, logit_bias={str(EOS): 100})
    assert ends["usage"]["completion_tokens"] == 1
    goes_on = post(model_stack, "/v1/completions", prompt=PROMPT, logit_bias={str(EOS): 100}, min_tokens=5)
    assert goes_on["usage"]["completion_tokens"] == 6
    assert goes_on["choices"][0]["finish_reason"] == "stop"


def test_a_plugin_that_the_server_was_started_with_is_asked_for_by_name(
    model_stack: Gateway, tokenizer: Tokenizer
) -> None:
    num_tokens = len(tokenizer.encode(PROMPT, add_special_tokens=False).ids)
    for field in ({"custom_logit_processor": "repeat-prompt"}, {"logit_processors": ["repeat-prompt"]}):
        assert complete(model_stack, **field, max_tokens=num_tokens) == PROMPT
    assert complete(model_stack, max_tokens=num_tokens) != PROMPT
    body = {"model": "micro", "prompt": PROMPT, "custom_logit_processor": "another"}
    refused = httpx.post(f"{model_stack.url}/v1/completions", json=body, timeout=120)
    assert refused.status_code == 400
    assert "another" in refused.json()["error"]["message"]
    assert "repeat-prompt" in refused.json()["error"]["message"], "what there is"
