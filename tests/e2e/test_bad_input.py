"""Requests that cannot be served: the status, and OpenAI's nested error object naming the field at fault."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from harness.processes import Gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]

Body = dict[str, Any] | bytes


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "micro", "messages": MESSAGES} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "micro", "prompt": "hello"} | fields


def chat_text(field: bytes) -> bytes:
    """A sound request with one more field, spelled as it is."""
    return json.dumps(chat()).encode()[:-1] + b", " + field + b"}"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOO_HOT = json.dumps(chat()).encode()[:-1] + b', "temperature": 1e999}'

NOT_A_NUMBER = json.dumps(chat()).encode()[:-1] + b', "temperature": NaN}'

# (name, path, body, status, field the error must name)
CASES: list[tuple[str, str, Body, int, str | None]] = [
    ("malformed JSON", CHAT, b'{"model": "micro", "messages": [', 400, None),
    ("not UTF-8", CHAT, b'{"model": "\xff"}', 400, "model"),
    ("not an object", CHAT, b"[1, 2]", 400, None),
    ("an empty body", COMPLETIONS, b"", 400, None),
    ("NaN for a number", CHAT, NOT_A_NUMBER, 400, "temperature"),
    ("unknown model", CHAT, chat(model="gpt-oss"), 404, "model"),
    ("unknown model, completions", COMPLETIONS, completion(model="gpt-oss"), 404, "model"),
    ("model of a wrong type", CHAT, chat(model=7), 400, "model"),
    ("no messages", CHAT, {"model": "micro"}, 400, "messages"),
    ("empty messages", CHAT, chat(messages=[]), 400, "messages"),
    ("messages of a wrong type", CHAT, chat(messages="hello"), 400, "messages"),
    ("unknown role", CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
    ("no content", CHAT, chat(messages=[*MESSAGES, {"role": "user"}]), 400, "messages[1].content"),
    ("content of a wrong type", CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    ("temperature too low", CHAT, chat(temperature=-0.1), 400, "temperature"),
    ("temperature too high", CHAT, chat(temperature=2.5), 400, "temperature"),
    ("temperature of a wrong type", CHAT, chat(temperature="hot"), 400, "temperature"),
    ("temperature beyond a float", CHAT, TOO_HOT, 400, "temperature"),
    ("top_p of zero", CHAT, chat(top_p=0), 400, "top_p"),
    ("top_p too high", CHAT, chat(top_p=1.01), 400, "top_p"),
    ("negative top_k", CHAT, chat(top_k=-5), 400, "top_k"),
    ("negative min_p", CHAT, chat(min_p=-0.5), 400, "min_p"),
    ("negative max_tokens", CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    ("fractional max_tokens", CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    ("max_tokens beyond the context", CHAT, chat(max_tokens=100_000_000), 400, "max_tokens"),
    ("the newer name of max_tokens", CHAT, chat(max_completion_tokens=100_000_000), 400, "max_completion_tokens"),
    ("fractional seed", CHAT, chat(seed=0.5), 400, "seed"),
    ("n of zero", CHAT, chat(n=0), 400, "n"),
    ("n of a wrong type", CHAT, chat(n="two"), 400, "n"),
    ("n too high", CHAT, chat(n=9), 400, "n"),
    ("a repeated key", CHAT, json.dumps(chat()).encode()[:-1] + b', "model": "micro"}', 400, "model"),
    ("a repeated key in a field nobody knows", CHAT, chat_text(b'"x": [{"y": {}, "y": 1}]'), 400, "x[0].y"),
    ("a body nested too deep", CHAT, chat_text(b'"x": ' + b"[" * 64 + b"]" * 64), 400, "x" + "[0]" * 63),
    ("too many objects", CHAT, chat_text(b'"x": [' + b"{}," * 100_000 + b"0]"), 400, None),
    ("a lone surrogate", CHAT, chat_text(b'"user": "x", "stop": "\\ud800"'), 400, "stop"),
    ("a control character", CHAT, chat_text(b'"stop": "\x01"'), 400, "stop"),
    ("ten megabytes of nothing", CHAT, b"<" * (7 << 20), 400, None),
    ("too many messages", CHAT, chat(messages=MESSAGES * 2049), 400, "messages"),
    ("too many tools", CHAT, chat(tools=[tool(f"f{number}") for number in range(129)]), 400, "tools"),
    ("two tools of one name", CHAT, chat(tools=[tool("f"), tool("f")]), 400, "tools[1].function.name"),
    ("an unknown tool", CHAT, chat(tools=[tool("f")], tool_choice=tool("g")), 400, "tool_choice.function.name"),
    ("a forced call without tools", CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    ("text and forced calls", CHAT, chat(tools=[tool("f")], tool_choice="required", regex="a"), 400, "regex"),
    ("two rules on the text", CHAT, chat(regex="a+", guided_choice=["a"]), 400, "guided_choice"),
    ("a format nobody knows", CHAT, chat(response_format={"type": "yaml"}), 400, "response_format.type"),
    ("a schema that is none", CHAT, chat(json_schema="{"), 400, "json_schema"),
    ("a schema of an unknown type", CHAT, chat(guided_json={"type": "text"}), 400, "guided_json.type"),
    ("a schema nothing obeys", CHAT, chat(guided_json={"minLength": 2, "maxLength": 1}), 400, "guided_json.minLength"),
    ("a schema from elsewhere", CHAT, chat(guided_json={"$ref": "http://x/y"}), 400, "guided_json.$ref"),
    ("a grammar without a root", COMPLETIONS, completion(ebnf='start ::= "a"'), 400, "ebnf"),
    ("code in place of a plugin", CHAT, chat(custom_logit_processor="{}"), 400, "custom_logit_processor"),
    ("half a token to think", CHAT, chat(custom_params={"thinking_budget": 0.5}), 400, "custom_params.thinking_budget"),
    ("too many stop strings", CHAT, chat(stop=[str(number) for number in range(17)]), 400, "stop"),
    ("an empty stop string", CHAT, chat(stop=""), 400, "stop"),
    ("stop of a wrong type", CHAT, chat(stop=5), 400, "stop"),
    ("too many top_logprobs", CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    ("top_logprobs without logprobs", CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    ("stream_options without stream", CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    ("stream of a wrong type", CHAT, chat(stream="yes"), 400, "stream"),
    ("thinking of an unknown type", CHAT, chat(thinking={"type": "maybe"}), 400, "thinking.type"),
    ("frequency_penalty out of range", CHAT, chat(frequency_penalty=3), 400, "frequency_penalty"),
    ("stop token beyond the vocabulary", CHAT, chat(stop_token_ids=[1_000_000_000]), 400, "stop_token_ids[0]"),
    ("no prompt", COMPLETIONS, {"model": "micro"}, 400, "prompt"),
    ("an empty prompt", COMPLETIONS, completion(prompt=""), 400, "prompt"),
    ("an empty list of prompts", COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    ("a prompt of a wrong type", COMPLETIONS, completion(prompt={"text": "x"}), 400, "prompt"),
    ("a mixed prompt", COMPLETIONS, completion(prompt=["x", 5]), 400, "prompt[1]"),
    ("a negative token id", COMPLETIONS, completion(prompt=[1, -2]), 400, "prompt[1]"),
    ("an over-long prompt", COMPLETIONS, completion(prompt=[5] * 200_000), 400, "prompt"),
    ("too many logprobs", COMPLETIONS, completion(logprobs=21), 400, "logprobs"),
    ("an oversize body", COMPLETIONS, b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, None),
]  # fmt: skip

# Fields that nothing honours, or that need logits, which the fake runner has not: refused by name, never ignored.
UNBUILT: list[tuple[str, dict[str, Any]]] = [
    ("logit_bias", chat(logit_bias={"5": 1})),
    ("frequency_penalty", chat(frequency_penalty=0.5)),
    ("presence_penalty", chat(presence_penalty=0.5)),
    ("repetition_penalty", chat(repetition_penalty=1.1)),
    ("min_tokens", chat(min_tokens=3)),
    ("suffix", completion(suffix="end")),
]


def post(gateway: Gateway, path: str, body: Body) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{gateway.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The nested error object, complete."""
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(("path", "body", "status", "param"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_bad_input_is_refused(fake_stack: Gateway, path: str, body: Body, status: int, param: str | None) -> None:
    response = post(fake_stack, path, body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error" or status in (404, 413)


@pytest.mark.parametrize(("field", "body"), UNBUILT, ids=[case[0] for case in UNBUILT])
def test_what_is_not_built_is_refused_by_name(fake_stack: Gateway, field: str, body: dict[str, Any]) -> None:
    response = post(fake_stack, COMPLETIONS if "prompt" in body else CHAT, body)
    assert response.status_code in (400, 501), response.text
    error = error_of(response)
    assert field in (error["param"] or ""), error
    assert field in error["message"]


def test_unknown_fields_are_ignored(fake_stack: Gateway) -> None:
    response = post(fake_stack, CHAT, chat(max_tokens=1, some_vendor_field={"x": 1}))
    assert response.status_code == 200, response.text


def test_unknown_routes_and_methods_answer_with_error_objects(fake_stack: Gateway) -> None:
    missing = httpx.get(f"{fake_stack.url}/v1/nothing")
    assert missing.status_code == 404
    error_of(missing)
    wrong = httpx.get(f"{fake_stack.url}{CHAT}")
    assert wrong.status_code == 405
    error_of(wrong)
    unknown = httpx.get(f"{fake_stack.url}/v1/models/gpt-oss")
    assert unknown.status_code == 404
    assert error_of(unknown)["param"] == "model"


def test_a_refused_stream_is_an_error_not_a_stream(fake_stack: Gateway) -> None:
    response = post(fake_stack, CHAT, chat(stream=True, temperature=9))
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    assert error_of(response)["param"] == "temperature"


def test_bad_input_leaves_nothing_behind(fake_stack: Gateway) -> None:
    for _, path, body, _, _ in CASES[:-1]:
        post(fake_stack, path, body)
    assert post(fake_stack, CHAT, chat(max_tokens=1)).status_code == 200
    fake_stack.wait_until_idle()
