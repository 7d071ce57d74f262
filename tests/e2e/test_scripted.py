"""Outputs a model may produce, replayed token by token: every recorded DSML shape and every way an answer can end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness.processes import ROOT, Gateway, serve_arguments
from harness.script import END, Line, call, calls, ids, write_script

ROWS = [json.loads(line) for line in (ROOT / "gateway/tests/data/dsml/parse.jsonl").read_text("utf-8").splitlines()]
V32_ROWS = [row for row in ROWS if row["format"] == "v32" and row["declares_tools"]]
NAMES = sorted({call["name"] for row in ROWS for answer in row["expected"] for call in answer["tool_calls"]})
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
    if "." not in name  # a name that may be called but, by the API's rules, not declared
]
CALL = calls(call("ping", {"host": "example.org", "count": 3}))


def cue(row: dict[str, Any]) -> str:
    return f"Play {row['id']}."


def answer(row: dict[str, Any]) -> str:
    return row["raw_text"] + (END if row["ended_by"] == "eos" else "")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    lines = [Line(cue(row), answer(row)) for row in V32_ROWS]
    lines += [
        Line("Count.", "one two three four" + END),
        Line("Call.", "Pinging." + CALL + END),
        Line("Think, then call.", "I need a ping.</think>Pinging." + CALL + END),
        Line("Answer with 42.", "42" + END),
    ]
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", lines)
    with Gateway(*serve_arguments("fake", "--fake-script", str(script))) as gateway, gateway.client() as client:
        gateway.ready()
        yield client


def ask(client: openai.OpenAI, content: str, *, stream: bool, thinking: bool = False, **more: Any) -> dict[str, Any]:
    """One answer as content, reasoning, calls and finish reason, collected from deltas when streamed."""
    request: Any = {
        "model": "micro",
        "messages": [{"role": "user", "content": content}],
        "extra_body": {"thinking": {"type": "enabled" if thinking else "disabled"}},
        **more,
    }
    if not stream:
        choice = client.chat.completions.create(**request).choices[0]
        message = choice.message
        made = [(made.function.name, made.function.arguments) for made in message.tool_calls or []]  # pyright: ignore[reportAttributeAccessIssue]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return result(message.content or "", reasoning, made, choice.finish_reason)

    content, reasoning, finish = "", "", None
    parts: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**request, stream=True):
        assert finish is None, "a chunk follows the finish reason"
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for made in delta.tool_calls or []:
            part = parts.setdefault(made.index, ["", ""])
            part[0] += (made.function and made.function.name) or ""
            part[1] += (made.function and made.function.arguments) or ""
        finish = chunk.choices[0].finish_reason
    assert list(parts) == list(range(len(parts)))
    return result(content, reasoning, [(name, arguments) for name, arguments in parts.values()], finish)


def result(content: str, reasoning: str, made: list[tuple[str, str]], finish: str | None) -> dict[str, Any]:
    return {
        "message": {
            "content": content,
            "reasoning_content": reasoning,
            "tool_calls": [{"name": name, "arguments": comparable(arguments)} for name, arguments in made],
        },
        "finish_reason": finish,
    }


def comparable(arguments: str) -> Any:
    """Arguments as a JSON value; as text where they are none, which a cut-off answer may leave."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("row", V32_ROWS, ids=lambda row: row["name"])
def test_every_recorded_shape(client: openai.OpenAI, row: dict[str, Any], stream: bool) -> None:
    told = ask(
        client,
        cue(row),
        stream=stream,
        thinking=row["thinking_mode"] == "thinking",
        tools=TOOLS,
        max_tokens=len(ids(answer(row))) or 1,
    )
    expected = [
        {
            **message,
            "tool_calls": [{**made, "arguments": comparable(made["arguments"])} for made in message["tool_calls"]],
        }
        for message in row["expected"]
    ]
    assert told["message"] in expected
    if not row["ambiguous"]:
        assert told["finish_reason"] == row["finish_reason"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
class TestFinishReasons:
    def test_stop_at_the_end_of_sequence(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Count.", stream=stream)
        assert (told["message"]["content"], told["finish_reason"]) == ("one two three four", "stop")

    def test_stop_at_a_stop_string(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Count.", stream=stream, stop=[" three"])
        assert (told["message"]["content"], told["finish_reason"]) == ("one two", "stop")

    def test_length(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Count.", stream=stream, max_tokens=len(ids("one two")))
        assert (told["message"]["content"], told["finish_reason"]) == ("one two", "length")

    def test_tool_calls(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Call.", stream=stream, tools=TOOLS)
        called = [{"name": "ping", "arguments": {"host": "example.org", "count": 3}}]
        assert told["message"] == {"content": "Pinging.", "reasoning_content": "", "tool_calls": called}
        assert told["finish_reason"] == "tool_calls"

    def test_tool_calls_after_reasoning(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Think, then call.", stream=stream, thinking=True, tools=TOOLS)
        assert told["message"]["reasoning_content"] == "I need a ping."
        assert [made["name"] for made in told["message"]["tool_calls"]] == ["ping"]
        assert told["finish_reason"] == "tool_calls"

    def test_a_stop_string_does_not_look_into_calls(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Call.", stream=stream, tools=TOOLS, stop=["example"])
        assert told["message"]["tool_calls"][0]["arguments"] == {"host": "example.org", "count": 3}
        assert told["finish_reason"] == "tool_calls"

    def test_markup_is_text_where_no_tool_is_declared(self, client: openai.OpenAI, stream: bool) -> None:
        told = ask(client, "Call.", stream=stream)
        assert told["message"]["tool_calls"] == []
        assert told["finish_reason"] == "stop"
        assert told["message"]["content"].startswith("Pinging.")


def test_a_tool_loop_goes_on_after_the_results(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Call."}]
    choice = client.chat.completions.create(model="micro", messages=messages, tools=TOOLS).choices[0]
    assert choice.message.tool_calls
    messages.append(choice.message)
    messages.append({"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Answer with 42."})
    assert (
        client.chat.completions.create(model="micro", messages=messages, tools=TOOLS).choices[0].message.content == "42"
    )
