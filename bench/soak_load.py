"""Clients of the soak: what they ask for, when they leave, and whether what they get is right.

Every answer is checked. The fake runner's tokens are known beforehand, so plain answers are compared token by token; a
model is asked questions whose answers are known, of which it may miss a few. Constrained answers must obey their
schema, forced calls must parse, and a request that cannot be served must say why.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker" / "tests" / "core"))

import httpx
import jsonschema
from baleen_eval.client import Client, Sampling
from baleen_eval.errors import TransportError
from baleen_eval.suites import SUITES, Choice
from baleen_worker.fake_runner import expected_tokens
from constrained_rig import draw_schema
from harness.weather import WEATHER, tool

VOCAB_SIZE = 2048
EOS = 1
NUM_FAMILIES = 8
NUM_SCHEMAS = 64
MAX_PROMPT = 600
NUM_QUESTIONS = 200
QUESTION_LENGTHS = (512, 1024)
# What a client does, and how often.
KINDS = {"plain": 40, "stream": 15, "leave early": 20, "schema": 15, "call": 5, "refused": 5}


class WrongAnswerError(AssertionError):
    """An answer is not what it must be."""


@dataclass
class Tally:
    """What came of everybody's requests."""

    done: Counter[str] = field(default_factory=Counter[str])
    missed: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list[str])


class Crowd:
    """Clients that ask, one request after another, until they are told to stop."""

    def __init__(self, url: str, size: int, seed: int, *, asks_model: bool = False) -> None:
        """`asks_model`: a model answers, not the fake runner."""
        self._url, self._size, self._seed = url, size, seed
        choice = Choice(seed=seed, num=NUM_QUESTIONS, lengths=QUESTION_LENGTHS)
        kinds = ("arith", "needle", "tools") if asks_model else ()
        self._questions = [(kind, question) for kind in kinds for question in SUITES[kind].questions(choice)]
        self._over = False
        g = random.Random(seed)
        self._schemas = [draw_schema(g) for _ in range(NUM_SCHEMAS)]
        self.tally = Tally()

    async def run(self, seconds: float) -> None:
        """Asks for so long, then lets every client end its last request. Wrong answers are noted in the tally."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._size)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as http,
            Client(self._url, api_key=None, timeout_s=600, parallel=self._size) as asker,
        ):
            clients = [asyncio.create_task(self._client(http, asker, number)) for number in range(self._size)]
            timer = asyncio.create_task(asyncio.sleep(seconds))
            await asyncio.wait([timer, *clients], return_when=asyncio.FIRST_COMPLETED)
            self._over = True
            timer.cancel()
            await asyncio.gather(*clients)

    async def _client(self, http: httpx.AsyncClient, asker: Client, number: int) -> None:
        g = random.Random(f"{self._seed} {number}")
        while not self._over:
            [kind] = g.choices([*KINDS], [*KINDS.values()])
            try:
                await self._ask(http, asker, kind, g)
            except (WrongAnswerError, TransportError, jsonschema.ValidationError, ValueError, httpx.HTTPError) as error:
                self.tally.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:500])

    async def _ask(self, http: httpx.AsyncClient, asker: Client, kind: str, g: random.Random) -> None:
        match kind:
            case "plain" if self._questions:
                await self._question(asker, g)
            case "plain":
                await self._plain(http, g)
            case "schema":
                await self._constrained(http, g, schema=g.choice(self._schemas))
            case "call":
                await self._constrained(http, g, schema=None)
            case "refused":
                response = await http.post("/v1/completions", json=_completion(g) | {"regex": "(a" * g.randint(1, 9)})
                _require(response.status_code == 400 and "regex" in response.text, response.text)
            case _:
                await self._stream(http, g, leaves=kind == "leave early")
        self.tally.done[kind] += 1

    async def _plain(self, http: httpx.AsyncClient, g: random.Random) -> None:
        body = _completion(g)
        response = await http.post("/v1/completions", json=body | {"return_token_ids": True})
        _require(response.status_code == 200, response.text)
        found = response.json()["choices"][0]["token_ids"]
        wanted = expected_tokens(body["prompt"], body["max_tokens"], VOCAB_SIZE, avoid_ids=(EOS,))
        _require(found == wanted, f"other tokens after a prompt of {len(body['prompt'])}")
        self.tally.tokens += len(found)

    async def _question(self, asker: Client, g: random.Random) -> None:
        kind, question = g.choice(self._questions)
        answer = await asker.ask("micro", question, Sampling(SUITES[kind].max_tokens), seed=0)
        self.tally.missed += not question.grade(answer)
        self.tally.tokens += answer.completion_tokens

    async def _stream(self, http: httpx.AsyncClient, g: random.Random, *, leaves: bool) -> None:
        """Reads an answer to its end, or leaves: before the first token, or after some lines."""
        body = _completion(g) | {"stream": True}
        patience_s = g.uniform(0.0, 2.0) if leaves and g.random() < 0.5 else None
        max_lines = g.randrange(1, 60) if leaves and patience_s is None else None
        try:
            async with asyncio.timeout(patience_s):
                await self._read(http, body, max_lines)
        except TimeoutError:
            return

    async def _read(self, http: httpx.AsyncClient, body: dict[str, Any], max_lines: int | None) -> None:
        last, num_lines = "", 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            _require(response.status_code == 200, str(response.status_code))
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last, num_lines = line, num_lines + 1
                if max_lines is not None and num_lines == max_lines:
                    return
        _require(last == "data: [DONE]", f"a stream ended with {last!r}")
        self.tally.tokens += body["max_tokens"]

    async def _constrained(self, http: httpx.AsyncClient, g: random.Random, schema: Any) -> None:
        """An answer that obeys a schema, or with None a call of a tool."""
        text = "Say something about whales. " * g.randrange(1, 20)
        body = {
            "model": "micro",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 400,
            "seed": g.randrange(1 << 30),
            "thinking": {"type": "disabled"},
        }
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        else:
            body |= {"tools": [tool("weather", strict=True)], "tool_choice": "required"}
        response = await http.post("/v1/chat/completions", json=body)
        _require(response.status_code == 200, response.text)
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "length":  # the fake runner has no wish to end
            self.tally.done["cut at max_tokens"] += 1
            return
        if schema is not None:
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            return
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def _completion(g: random.Random) -> dict[str, Any]:
    """A prompt that begins as those of its family do."""
    family = random.Random(g.randrange(NUM_FAMILIES))
    shared = [family.randrange(3, VOCAB_SIZE) for _ in range(g.randrange(MAX_PROMPT))]
    prompt = [*shared, *(g.randrange(3, VOCAB_SIZE) for _ in range(g.choice([1, 1, 20, 70])))]
    return {"model": "micro", "prompt": prompt, "max_tokens": g.randrange(1, 200), "ignore_eos": True}


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise WrongAnswerError(problem[:500])
