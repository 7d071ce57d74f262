"""Clients of the chaos suite. They write down what they asked and what they got, and judge nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
from chaos.ledger import Ledger

VOCAB_SIZE = 2048
NUM_FAMILIES = 6
MAX_PROMPT = 300
# Longer than any fault lasts: a request that has no end by then hangs.
PATIENCE_S = 90.0
PAUSE_AFTER_FAILURE_S = 0.1


class Crowd:
    """`size` clients that stream completions, one after another, until told to stop."""

    def __init__(self, url: str, size: int, seed: int, ledger: Ledger) -> None:
        self._url, self._size, self._seed, self._ledger = url, size, seed, ledger
        self._over = False
        self._num_asked = 0

    async def run(self) -> None:
        """Asks until `stop`, then waits for every last answer."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._size)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self._size)))

    def stop(self) -> None:
        self._over = True

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        g = random.Random(f"{self._seed} {number}")
        while not self._over:
            if not await self.ask(http, g):
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def ask(self, http: httpx.AsyncClient, g: random.Random) -> bool:
        """One streamed answer; whether it came whole."""
        family = random.Random(g.randrange(NUM_FAMILIES))
        shared = [family.randrange(3, VOCAB_SIZE) for _ in range(g.randrange(MAX_PROMPT))]
        prompt = [*shared, *(g.randrange(3, VOCAB_SIZE) for _ in range(g.randrange(1, 70)))]
        return await self._ask(http, prompt, g.randrange(1, 120))

    async def ask_for(self, prompt_tokens: int, max_tokens: int, g: random.Random) -> bool:
        """One streamed answer beside those of the clients, as long as is wished."""
        prompt = [g.randrange(3, VOCAB_SIZE) for _ in range(prompt_tokens)]
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as http:
            return await self._ask(http, prompt, max_tokens)

    async def _ask(self, http: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> bool:
        self._num_asked += 1
        number = self._num_asked
        self._ledger.write("asked", request=number, prompt=prompt, max_tokens=num_tokens)
        body = {
            "model": "micro",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        ended = await read_answer(http, body)
        self._ledger.write("ended", request=number, **ended)
        return ended["how"] == "done"


async def read_answer(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """What came of a request.

    `how`: "done" (the stream's mark), "refused" (a status before any token), "error" (an error event), "cut" (the
    connection broke), "hung" (no end in PATIENCE_S), or "unfinished" (a stream that ended with none of these).
    `longest_wait_s`: for a token or the end, from asking on.
    """
    found: dict[str, Any] = {"how": "unfinished", "tokens": [], "finish_reason": None}
    waits = _Waits()
    ended = await _read_events(http, body, found, waits)
    waits.over()
    return ended | {"longest_wait_s": round(waits.longest_s, 3)}


class _Waits:
    """The longest time between two events."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.longest_s = 0.0

    def over(self) -> None:
        """Something has come."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._since)
        self._since = now


async def _read_events(
    http: httpx.AsyncClient, body: dict[str, Any], found: dict[str, Any], waits: _Waits
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(PATIENCE_S), http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return found | {"how": "refused", "status": response.status_code, "message": text[:500]}
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    waits.over()
                    _take_event(line.removeprefix("data: "), found)
    except TimeoutError:
        return found | {"how": "hung"}
    except httpx.HTTPError as error:
        return found | {"how": "cut", "message": f"{type(error).__name__}: {error}"}
    return found


def _take_event(data: str, found: dict[str, Any]) -> None:
    if found["how"] != "unfinished":
        found["how"] = f"went on after {found['how']}"
    elif data == "[DONE]":
        found["how"] = "done"
    else:
        event = json.loads(data)
        if "error" in event:
            found |= {"how": "error", "message": str(event["error"].get("message"))}
            return
        for choice in event["choices"]:
            found["tokens"].extend(choice.get("token_ids") or [])
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
