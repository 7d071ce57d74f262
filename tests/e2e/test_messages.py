"""`/v1/messages` through the unmodified Anthropic client: text, thinking, a tool loop, ends, errors, leaving early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from harness.processes import Gateway, serve_arguments
from harness.script import END, TALE, Line, call, calls, write_script

MODEL = "micro"
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
THINK: Any = {"type": "adaptive"}
TWO_CALLS = calls(call("get_weather", {"city": "Oslo"}), call("get_weather", {"city": 'Rome "北"', "days": 2}))
LINES = [
    Line("Greet.", "Good morning." + END),
    Line("Weather?", "I need both.</think>Let me see." + TWO_CALLS + END),
    Line("sun in Rome", "Sun beats rain.</think>Go to Rome." + END),
    Line("Count.", "one two three four five six" + END),
    Line("Tell a tale.", TALE + END),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", LINES)
    flags = ["--fake-step-ms", "2", "--fake-script", str(script), "--api-key", "whale"]
    with Gateway(*serve_arguments("fake", *flags)) as gateway:
        yield gateway.ready()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with connect(gateway) as client:
        yield client


def connect(gateway: Gateway) -> anthropic.Anthropic:
    """The client never retries, so that each test sees what the server did. It sends its key as `x-api-key`."""
    return anthropic.Anthropic(base_url=gateway.url, api_key="whale", max_retries=0, timeout=120)


def ask(client: anthropic.Anthropic, streaming: bool, **request: Any) -> Message:
    """The message, in one piece or added up by the client from its events."""
    settings: Any = {"model": MODEL, "max_tokens": 256} | request
    if not streaming:
        return client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_answers_a_text(client: anthropic.Anthropic, streaming: bool) -> None:
    message = ask(client, streaming, messages=[user("Greet.")], system="Be kind.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Good morning."
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens > 0
    counted = client.messages.count_tokens(model=MODEL, messages=[user("Greet.")], system="Be kind.")  # pyright: ignore[reportArgumentType]
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_loop_with_two_parallel_calls_keeps_its_thinking(client: anthropic.Anthropic, streaming: bool) -> None:
    results = {"Oslo": "rain in Oslo", 'Rome "北"': "sun in Rome"}
    conversation: list[Any] = [user("Weather?")]
    first = ask(client, streaming, messages=conversation, tools=TOOLS, thinking=THINK)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    made = [block for block in first.content if block.type == "tool_use"]
    assert [block.input for block in made] == [{"city": "Oslo"}, {"city": 'Rome "北"', "days": 2}]
    conversation.append({"role": "assistant", "content": [block.to_dict() for block in first.content]})
    conversation.append(
        user(
            [
                {"type": "tool_result", "tool_use_id": block.id, "content": results[str(block.input["city"])]}
                for block in reversed(made)
            ]
        )
    )
    final = ask(client, streaming, messages=conversation, tools=TOOLS, thinking=THINK)
    thinking, text = final.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Sun beats rain."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "Go to Rome."


def test_text_streams_in_pieces(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=512, messages=[user("Tell a tale.")]) as stream:  # pyright: ignore[reportArgumentType]
        pieces = list(stream.text_stream)
    assert "".join(pieces) == TALE
    assert len(pieces) > 2


@pytest.mark.parametrize("streaming", [False, True])
def test_every_end_has_its_reason(client: anthropic.Anthropic, streaming: bool) -> None:
    cut = ask(client, streaming, messages=[user("Count.")], max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = ask(client, streaming, messages=[user("Count.")], stop_sequences=["never", " four"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " four")
    (block,) = stopped.content
    assert block.type == "text"
    assert block.text == "one two three"


def test_a_client_that_leaves_frees_its_pages(slow_stack: Gateway) -> None:
    with connect(slow_stack) as client:
        settings: Any = {"model": MODEL, "max_tokens": 4000, "messages": [user("Go on.")]}
        with client.messages.stream(**settings, extra_body={"ignore_eos": True}) as stream:
            for _ in stream.text_stream:
                break
            assert slow_stack.metrics()["baleen_active_requests"] == 1
    slow_stack.wait_until_idle()


def test_refusals_reach_the_client_as_its_own_errors(gateway: Gateway, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, False, messages=[user("x")], extra_body={"temperature": 5})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "temperature"
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        ask(client, False, messages=[user("x")], model="claude")
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="shark"), False, messages=[user("x")])
    assert httpx.post(f"{gateway.url}/v1/messages", headers={"authorization": "Bearer whale"}).status_code == 400
