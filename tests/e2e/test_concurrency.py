"""Many clients at once, and clients that leave: nobody's tokens change and everything is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from harness.processes import Gateway, serve_arguments, wait_for

MODEL = "micro"
# At 20 ms a step this outlasts every wait here: whoever keeps computing is found out.
LONG = 15_000
PAGES_IN_USE = "baleen_worker_used_kv_pages"


async def stream_text(client: openai.AsyncOpenAI, prompt: str, max_tokens: int) -> str:
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([choice.text async for chunk in stream for choice in chunk.choices])


def test_sixty_four_streams_at_once_equal_each_alone(stack: Gateway) -> None:
    prompts = [f"{number} whales swim past buoy number {number * number}." for number in range(64)]

    async def run() -> tuple[list[str], list[str]]:
        async with stack.async_client() as client:
            together = await asyncio.gather(*(stream_text(client, prompt, 32) for prompt in prompts))
            alone = [await stream_text(client, prompt, 32) for prompt in prompts[::8]]
        return together, alone

    together, alone = asyncio.run(run())
    assert together[::8] == alone
    # A model may answer two prompts alike; streams that are mixed up or merged would repeat far more.
    assert len(set(together)) > 32
    stack.wait_until_idle()


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_mid_stream_frees_everything(slow_stack: Gateway, path: str, choices: int) -> None:
    slow_stack.wait_until_idle()
    options: dict[str, Any] = {"model": MODEL, "max_tokens": LONG, "n": choices, "stream": True}
    extra = {"ignore_eos": True}
    with slow_stack.client() as client:
        if path == "chat":
            messages: list[Any] = [{"role": "user", "content": "Count the waves."}]
            stream: Any = client.chat.completions.create(messages=messages, **options, extra_body=extra)
        else:
            stream = client.completions.create(prompt="Count the waves.", **options, extra_body=extra)
        chunks = iter(stream)
        for _ in range(4 * choices):
            next(chunks)
        held = wait_for("the engine reports the load", lambda: _held(slow_stack, choices))
        assert held[PAGES_IN_USE] >= choices
        stream.close()
    slow_stack.wait_until_idle()


def _held(gateway: Gateway, choices: int) -> dict[str, float]:
    now = gateway.in_use()
    return now if now["baleen_worker_running_requests"] == choices else {}


def test_a_client_that_leaves_before_its_answer_frees_everything(slow_stack: Gateway) -> None:
    slow_stack.wait_until_idle()

    async def leave() -> None:
        async with slow_stack.async_client() as client:
            request = client.completions.create(
                model=MODEL, prompt="Count the waves.", max_tokens=LONG, extra_body={"ignore_eos": True}
            )
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request, 1.0)

    asyncio.run(leave())
    slow_stack.wait_until_idle()


def test_more_work_than_pages_waits_its_turn(slow_stack: Gateway) -> None:
    """Each request may need a quarter of the pool: most of them wait, all of them finish, none over-commits."""

    async def run() -> list[str]:
        async with slow_stack.async_client() as client:
            requests = (
                client.completions.create(
                    model=MODEL,
                    prompt=[7] * 15000,
                    max_tokens=100,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(12)
            )
            return [answer.choices[0].text for answer in await asyncio.gather(*requests)]

    texts = asyncio.run(run())
    assert len(texts) == 12
    assert len(set(texts)) == 1
    slow_stack.wait_until_idle()


def test_a_request_that_breaks_in_the_engine_leaves_its_neighbours_alone(start: Any) -> None:
    poison = 300
    gateway: Gateway = start(*serve_arguments("fake", "--fake-step-ms", "10", "--fake-poison-token-id", str(poison)))

    async def run() -> tuple[list[str], list[str]]:
        async with gateway.async_client() as client:
            alone = [await stream_text(client, f"neighbour {number}", 40) for number in range(4)]
            neighbours = [asyncio.create_task(stream_text(client, f"neighbour {number}", 40)) for number in range(4)]
            await asyncio.sleep(0.1)
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model=MODEL, prompt=[1, poison, 2], max_tokens=4)
            return alone, await asyncio.gather(*neighbours)

    alone, beside = asyncio.run(run())
    assert beside == alone
    gateway.wait_until_idle()
