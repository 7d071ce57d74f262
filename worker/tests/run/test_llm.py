"""Generation in process: the same tokens as a server gives, checked requests, and an engine that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from baleen_worker import LLM, RequestFailedError
from baleen_worker.fake_runner import expected_logprob, expected_tokens
from baleen_worker.model_config import load_model_config
from baleen_worker.request import FinishReason

MICRO_MODEL = Path(__file__).resolve().parents[3] / "models" / "micro"
MODEL = load_model_config(MICRO_MODEL)


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, MODEL.vocab_size, avoid_ids=MODEL.eos_token_ids)


@pytest.fixture(scope="module")
def fake() -> Iterator[LLM]:
    with LLM(MICRO_MODEL, runner="fake", max_total_tokens=65536, fake_poison_token_id=7) as llm:
        yield llm


@pytest.fixture(scope="module")
def micro() -> Iterator[LLM]:
    with LLM(MICRO_MODEL, dtype="float32", max_total_tokens=16384) as llm:
        yield llm


def test_completions_come_in_the_order_of_the_prompts(fake: LLM) -> None:
    prompts = [[100 + i] * (1 + 13 * i) for i in range(40)]
    params = [{"max_tokens": 1 + i % 5} for i in range(40)]
    completions = fake.generate(prompts, params)
    assert [c.prompt_token_ids for c in completions] == prompts
    assert [c.token_ids for c in completions] == [expected(p, 1 + i % 5) for i, p in enumerate(prompts)]
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}


def test_logprobs_describe_their_own_request(fake: LLM) -> None:
    prompts = [[50, 60, 70], [80, 90]]
    params = [{"max_tokens": 3, "logprobs": 2}, {"max_tokens": 2, "logprobs": 0, "prompt_logprobs": 1}]
    first, second = fake.generate(prompts, params)
    assert [told.token_id for told in first.logprobs] == first.token_ids
    assert [len(told.top) for told in first.logprobs] == [2, 2, 2]
    assert first.prompt_logprobs == []
    assert [told.logprob for told in second.prompt_logprobs] == [pytest.approx(expected_logprob([80], 90))]
    assert [told.token_id for told in second.logprobs] == second.token_ids


def test_async_callers_share_the_engine(fake: LLM) -> None:
    async def ask_all() -> None:
        answers = await asyncio.gather(*(fake.agenerate([[200 + i]], {"max_tokens": 4}) for i in range(8)))
        assert [answer[0].token_ids for answer in answers] == [expected([200 + i], 4) for i in range(8)]
        pieces = [piece async for piece in fake.astream([300, 301], {"max_tokens": 6})]
        assert [token_id for piece in pieces for token_id in piece] == expected([300, 301], 6)

    asyncio.run(ask_all())


def test_leaving_a_stream_aborts_its_request(fake: LLM) -> None:
    async def leave() -> None:
        stream = fake.astream([300], {"max_tokens": 10_000})
        await anext(stream)
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue] - it is a generator

    asyncio.run(leave())
    # What nobody waits for would hold pages that this needs.
    assert len(fake.generate([[1, 2]] * 8, {"max_tokens": 8000})[0].token_ids) == 8000


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ([[1], []], {}, "prompt_token_ids: the prompt is empty"),
        ([[1 << 30]], {}, "does not exist"),
        ([[1]], {"temperature": 9}, "temperature: 9 is out of range"),
        ([[1]], {"warmth": 1}, "warmth"),
        ([[1]], {"max_tokens": "many"}, "max_tokens"),
        ([[1], [2]], [{}], "1 params were given for 2 prompts"),
        ("text", {}, "give a list of prompts"),
    ],
)
def test_a_wrong_request_is_refused_before_any_is_queued(fake: LLM, prompts: object, params: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fake.generate(prompts, params)  # pyright: ignore[reportArgumentType]


def test_a_request_that_breaks_fails_alone(fake: LLM) -> None:
    with pytest.raises(RequestFailedError, match="the engine failed on this request"):
        fake.generate([[1, 7]], {"max_tokens": 2})
    assert fake.generate([[1, 8]], {"max_tokens": 2})[0].token_ids == expected([1, 8], 2)


def test_text_goes_in_and_comes_out(micro: LLM) -> None:
    alone = micro.generate(["The key is 5. The key"], {"max_tokens": 12, "temperature": 0})[0]
    assert alone.text == micro.decode(alone.token_ids)
    beside = micro.generate(["Something else.", "The key is 5. The key"], {"max_tokens": 12, "temperature": 0})[1]
    assert beside.token_ids == alone.token_ids


def test_an_ended_engine_says_so() -> None:
    llm = LLM(MICRO_MODEL, runner="fake", max_total_tokens=4096)
    llm.close()
    with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
        llm.generate([[1]], {"max_tokens": 1})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float12"}, "--dtype"),
        ({"no_such_thing": 3}, "--no-such-thing"),
        ({"context_length": 1 << 30}, "--context-length"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(MICRO_MODEL, **options)
