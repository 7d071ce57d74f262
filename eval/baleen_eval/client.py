"""One question over the OpenAI API: request, checked response. Whatever is not an answer is a `TransportError`."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from baleen_eval.errors import TransportError, UsageError
from baleen_eval.question import Answer, Question
from baleen_eval.texts.conversation import Call, Message, dumps

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are chosen. temperature 0 is greedy; top_p None is the server's own."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None


class Client:
    """A server's chat endpoint. Use as an asynchronous context manager."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float, parallel: int) -> None:
        """`base_url` with or without /v1. UsageError where it is no URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"--base-url {base_url!r} is no URL such as http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model_name(self, asked: str | None) -> str:
        """The name of the served model, which is `asked` where that is not None. UsageError, with a sentence, where
        the server cannot be reached, does not serve it, or serves several and none was asked for.
        """
        try:
            response = await self._http.get(f"{self.base_url}/models")
        except httpx.HTTPError as error:
            raise UsageError(f"no server answers at {self.base_url}: {_reason(error)}") from error
        if response.status_code != 200:
            raise UsageError(f"{self.base_url}/models answered {response.status_code}: {_message(response)}")
        try:
            served = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.base_url}/models does not list models as the OpenAI API does") from error
        if asked is None and len(served) == 1:
            return served[0]
        if asked in served:
            return asked
        listed = ", ".join(served) or "none"
        if asked is None:
            raise UsageError(f"the server has several models or none ({listed}): name one with --model")
        raise UsageError(f"the server has no model {asked!r}; it has: {listed}")

    async def ask(self, model: str, question: Question, sampling: Sampling, *, seed: int) -> Answer:
        """The model's answer. TransportError where there is none."""
        try:
            response = await self._http.post(
                f"{self.base_url}/chat/completions", json=_request(model, question, sampling, seed)
            )
        except httpx.HTTPError as error:
            raise TransportError(_reason(error)) from error
        if response.status_code != 200:
            raise TransportError(f"status {response.status_code}: {_message(response)}")
        try:
            return _answer(response.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise TransportError(f"the body is not a chat completion: {type(error).__name__}: {error}") from error


def _request(model: str, question: Question, sampling: Sampling, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message_field(message) for message in question.messages if message.content or message.calls],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": seed,
    }
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if question.thinking is not None:
        body["chat_template_kwargs"] = {"thinking": question.thinking}
    tools = [tool for message in question.messages for tool in message.tools]
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    return body


def _message_field(message: Message) -> dict[str, Any]:
    field: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        field["tool_calls"] = [_call_field(number, call) for number, call in enumerate(message.calls)]
    return field


def _call_field(number: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dumps(call.arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _answer(body: dict[str, Any]) -> Answer:
    choice, usage = body["choices"][0], body.get("usage") or {}
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Answer(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(calls),
        finish_reason=choice.get("finish_reason") or "",
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
    )


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _message(response: httpx.Response) -> str:
    """What an error body says, on one line."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(response.text[:200].split()) or "an empty body"
