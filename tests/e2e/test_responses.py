"""`/v1/responses` through the unmodified OpenAI client: text, reasoning, a tool loop, scores, leaving early."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from harness.processes import Gateway, serve_arguments
from harness.script import END, Line, call, calls, write_script
from openai.types.responses import Response

MODEL = "micro"
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
TWO_CALLS = calls(call("get_weather", {"city": "Oslo"}), call("get_weather", {"city": 'Rome "北"'}))
LINES = [
    Line("Greet.", "Good morning." + END),
    Line("Think.", "It is early.</think>Good morning." + END),
    Line("Weather?", "I need both.</think>Let me see." + TWO_CALLS + END),
    Line("sun in Rome", "Sun beats rain.</think>Go to Rome." + END),
    Line("Count.", "one two three four five six" + END),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", LINES)
    with Gateway(*serve_arguments("fake", "--fake-script", str(script))) as gateway:
        yield gateway.ready()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


def ask(client: openai.OpenAI, streaming: bool, **request: Any) -> Response:
    """The response, in one piece or added up by the client from its events."""
    if not streaming:
        return client.responses.create(model=MODEL, **request)
    with client.responses.stream(model=MODEL, **request) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_answers_a_text(client: openai.OpenAI, streaming: bool) -> None:
    response = ask(client, streaming, input="Greet.", instructions="Be kind.")
    assert (response.status, response.output_text) == ("completed", "Good morning.")
    assert response.id.startswith("resp_")
    assert response.instructions == "Be kind."
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    (message,) = response.output
    assert message.type == "message"
    assert message.role == "assistant"


def test_every_event_is_one_the_client_knows_and_they_are_numbered(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Think.", stream=True, extra_body=THINK))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for event in events:
        if event.type in deltas:
            deltas[event.type] += getattr(event, "delta", "")
    assert list(deltas.values()) == ["It is early.", "Good morning."]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    added = [kind for kind in kinds if kind == "response.output_item.added"]
    assert len(added) == kinds.count("response.output_item.done") == 2


THINK = {"thinking": {"type": "enabled"}}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_loop_with_two_parallel_calls_keeps_its_reasoning(client: openai.OpenAI, streaming: bool) -> None:
    results = {"Oslo": "rain in Oslo", 'Rome "北"': "sun in Rome"}
    conversation: list[Any] = [{"role": "user", "content": "Weather?"}]
    settings: Any = {"tools": TOOLS, "reasoning": {"effort": "high"}, "store": False}
    response = ask(client, streaming, input=conversation, **settings)
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    conversation += [item.model_dump(exclude_none=True) for item in response.output]
    made = [item for item in response.output if item.type == "function_call"]
    assert len({item.call_id for item in made}) == 2
    for item in reversed(made):
        assert item.name == "get_weather"
        output = results[json.loads(item.arguments)["city"]]
        conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    final = ask(client, streaming, input=conversation, **settings)
    assert final.output_text == "Go to Rome."
    reasoning = final.output[0]
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or []] == ["Sun beats rain."]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_is_cut_says_so(client: openai.OpenAI, streaming: bool) -> None:
    if streaming:
        events = list(client.responses.create(model=MODEL, input="Count.", max_output_tokens=3, stream=True))
        last = events[-1]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(model=MODEL, input="Count.", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_log_probabilities_come_where_they_are_asked_for(client: openai.OpenAI) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(model=MODEL, input="Anything.", max_output_tokens=4, **wanted)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(score.top_logprobs) for score in part.logprobs] == [2] * len(part.logprobs)
    assert len(part.logprobs) == 4


def test_a_client_that_leaves_frees_its_pages(slow_stack: Gateway) -> None:
    with slow_stack.client() as client:
        stream = client.responses.create(
            model=MODEL, input="Go on.", max_output_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        assert slow_stack.metrics()["baleen_active_requests"] == 1
        stream.close()
    slow_stack.wait_until_idle()


def test_refusals_reach_the_client_as_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": "x"}], temperature=5)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-oss", input="x")
    with pytest.raises(openai.APIStatusError) as unbuilt:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert (unbuilt.value.status_code, unbuilt.value.param) == (501, "previous_response_id")


def test_nothing_is_stored(gateway: Gateway, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Greet.", store=True)
    assert response.model_dump()["store"] is False
    assert httpx.get(f"{gateway.url}/v1/responses/{response.id}").status_code == 404
