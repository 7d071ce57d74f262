"""Clients that people use, unmodified, against a scripted model: chat, streams, tools, reasoning, hanging up.

The OpenAI client itself is in every other file of this folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
from harness.processes import Gateway, wait_for
from harness.script import TALE

# Third parties warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


def idle(gateway: Gateway) -> Callable[[], bool]:
    return lambda: gateway.metrics()["baleen_active_requests"] == 0.0


class TestLiteLlm:
    @pytest.fixture
    def ask(self, scripted_stack: Gateway) -> Iterator[Callable[..., Any]]:
        import litellm

        litellm.telemetry = False

        def ask(content: str | list[Any], **more: Any) -> Any:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            return litellm.completion(
                model="openai/micro", api_base=f"{scripted_stack.url}/v1", api_key="unused", messages=messages, **more
            )

        with asyncio.Runner() as runner:
            runner.get_loop()  # it takes the thread's loop, else makes one that nobody closes
            yield ask

    def test_chat(self, ask: Callable[..., Any]) -> None:
        answer = ask("Say hello.")
        assert answer.choices[0].message.content == "Hello there, friend."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 0

    def test_stream(self, ask: Callable[..., Any]) -> None:
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask("Tell a tale.", stream=True)]
        assert "".join(pieces) == TALE
        assert len([piece for piece in pieces if piece]) > 1

    def test_reasoning(self, ask: Callable[..., Any]) -> None:
        message = ask("Think first.", extra_body={"thinking": {"type": "enabled"}}).choices[0].message
        assert (message.reasoning_content, message.content) == ("A greeting is due.", "Hello.")

    def test_tool_loop(self, ask: Callable[..., Any]) -> None:
        messages: list[Any] = [{"role": "user", "content": "Add 2 and 3, and 40 and 2."}]
        message = ask(messages, tools=[ADD]).choices[0].message
        assert [json.loads(made.function.arguments) for made in message.tool_calls] == [
            {"a": 2, "b": 3},
            {"a": 40, "b": 2},
        ]
        messages.append(message.model_dump())
        for made in message.tool_calls:
            total = sum(json.loads(made.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": made.id, "content": str(total)})
        assert ask(messages, tools=[ADD]).choices[0].message.content == "The sums are 5 and 42."

    def test_bad_request_is_one(self, ask: Callable[..., Any]) -> None:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ask("Say hello.", temperature=9)


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class TestLangChain:
    @pytest.fixture
    def model(self, scripted_stack: Gateway) -> Any:
        from langchain_openai import ChatOpenAI
        from pydantic import SecretStr

        return ChatOpenAI(
            model="micro", base_url=f"{scripted_stack.url}/v1", api_key=SecretStr("unused"), max_retries=0
        )

    def test_chat(self, model: Any) -> None:
        answer = model.invoke("Say hello.")
        assert answer.content == "Hello there, friend."
        assert answer.usage_metadata["output_tokens"] > 0

    def test_stream(self, model: Any) -> None:
        pieces = [chunk.content for chunk in model.stream("Tell a tale.")]
        assert "".join(pieces) == TALE
        assert len([piece for piece in pieces if piece]) > 1

    def test_tool_loop(self, model: Any) -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = model.bind_tools([ADD])
        question = HumanMessage("Add 2 and 3, and 40 and 2.")
        answer = bound.invoke([question])
        assert [made["args"] for made in answer.tool_calls] == [{"a": 2, "b": 3}, {"a": 40, "b": 2}]
        results = [
            ToolMessage(str(made["args"]["a"] + made["args"]["b"]), tool_call_id=made["id"])
            for made in answer.tool_calls
        ]
        assert bound.invoke([question, answer, *results]).content == "The sums are 5 and 42."

    def test_streamed_tool_calls_add_up(self, model: Any) -> None:
        whole = None
        for chunk in model.bind_tools([ADD]).stream("Add 2 and 3, and 40 and 2."):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert [made["args"] for made in whole.tool_calls] == [{"a": 2, "b": 3}, {"a": 40, "b": 2}]

    def test_leaving_a_stream_ends_its_request(self, model: Any, scripted_stack: Gateway) -> None:
        stream = model.stream("Talk for long.", max_tokens=15_000)
        next(stream)
        stream.close()
        wait_for("the abandoned request is gone", idle(scripted_stack), 10)


class TestPydanticAi:
    @pytest.fixture
    def run(self, scripted_stack: Gateway) -> Callable[..., str]:
        """Runs an agent to its answer, with a connection pool that ends with the event loop that opened it."""
        import httpx2
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        async def answer(prompt: str, tools: Sequence[Callable[..., Any]]) -> str:
            async with httpx2.AsyncClient() as pool:
                provider = OpenAIProvider(base_url=f"{scripted_stack.url}/v1", api_key="unused", http_client=pool)
                agent = Agent(OpenAIChatModel("micro", provider=provider), tools=tools)
                return (await agent.run(prompt)).output

        return lambda prompt, *tools: asyncio.run(answer(prompt, tools))

    def test_chat(self, run: Callable[..., str]) -> None:
        assert run("Say hello.") == "Hello there, friend."

    def test_tools_run_and_their_results_come_back(self, run: Callable[..., str]) -> None:
        added: list[tuple[int, int]] = []

        def add(a: int, b: int) -> int:
            added.append((a, b))
            return a + b

        assert run("Add 2 and 3, and 40 and 2.", add) == "The sums are 5 and 42."
        assert sorted(added) == [(2, 3), (40, 2)]
