"""Chat completions through the unmodified OpenAI client, by the fake runner and by the real model."""

from __future__ import annotations

import math
import re
from typing import Any

import openai
import pytest
from harness.processes import MICRO_MODEL, Gateway
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

MODEL = "micro"
QUESTION: list[Any] = [{"role": "user", "content": "What does a baleen whale eat?"}]
THINK = {"thinking": {"type": "enabled"}}


def ask(client: openai.OpenAI, **options: Any) -> ChatCompletion:
    """One answer, greedy and short unless `options` say otherwise; the end of sequence does not cut it."""
    settings: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    extra = {"ignore_eos": True} | options.pop("extra_body", {})
    return client.chat.completions.create(**(settings | options), extra_body=extra)


def ask_streaming(client: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    """The chunks of the same answer."""
    settings: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    extra = {"ignore_eos": True} | options.pop("extra_body", {})
    return list(client.chat.completions.create(**(settings | options), stream=True, extra_body=extra))


def content_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = (choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(delta.content or "" for delta in deltas)


def reasoning_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = (choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)


def text_of(answer: ChatCompletion, index: int = 0) -> str:
    message = answer.choices[index].message
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


def test_an_answer_has_the_shape_clients_expect(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.message.content


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    answer = ask(client)
    chunks = ask_streaming(client)
    assert content_of(chunks) == answer.choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_counts_tokens(client: openai.OpenAI) -> None:
    usage = ask(client, max_tokens=7).usage
    assert usage is not None
    assert usage.completion_tokens == 7
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + 7
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    longer = ask(client, max_tokens=7, messages=[{"role": "user", "content": QUESTION[0]["content"] * 2}]).usage
    assert longer is not None
    assert longer.prompt_tokens > usage.prompt_tokens


def test_a_stream_ends_with_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = ask_streaming(client, stream_options={"include_usage": True})
    *before, last = chunks
    assert all(chunk.usage is None for chunk in before)
    assert last.choices == []
    assert last.usage == ask(client).usage


def test_thinking_splits_reasoning_from_content(client: openai.OpenAI) -> None:
    thinking = ask(client, extra_body=THINK)
    plain = ask(client)
    assert getattr(thinking.choices[0].message, "reasoning_content", None)
    assert not getattr(plain.choices[0].message, "reasoning_content", None)
    assert plain.choices[0].message.content
    usage = thinking.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens
    chunks = ask_streaming(client, extra_body=THINK)
    assert reasoning_of(chunks) == getattr(thinking.choices[0].message, "reasoning_content", None)
    assert content_of(chunks) == (thinking.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("switch", "thinks"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({}, False),
    ],
)
def test_every_spelling_of_the_thinking_switch(fake_stack: Gateway, switch: dict[str, Any], thinks: bool) -> None:
    with fake_stack.client() as client:
        message = ask(client, extra_body=switch).choices[0].message
    assert bool(getattr(message, "reasoning_content", None)) is thinks


def test_the_thinking_mode_changes_the_prompt(fake_stack: Gateway) -> None:
    with fake_stack.client() as client:
        assert text_of(ask(client, extra_body=THINK)) != text_of(ask(client))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI, streaming: bool) -> None:
    whole = ask(client, max_tokens=48).choices[0].message.content
    assert whole
    (*_, stop) = re.findall(r"[ -~]{2,3}", whole[: len(whole) // 2 + 8])
    expected = whole[: whole.index(stop)]
    if streaming:
        chunks = ask_streaming(client, max_tokens=48, stop=stop)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert (content_of(chunks), reasons) == (expected, ["stop"])
    else:
        choice = ask(client, max_tokens=48, stop=["never to be seen", stop]).choices[0]
        assert (choice.message.content or "", choice.finish_reason) == (expected, "stop")


def test_a_stop_token_ends_the_answer_without_its_text(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=16, logprobs=True).choices[0]
    assert choice.logprobs is not None
    spelled = [bytes(entry.bytes or []) for entry in choice.logprobs.content or []]
    tokenizer = Tokenizer.from_file(str(MICRO_MODEL / "tokenizer.json"))
    ids = {tokenizer.decode([token_id]).encode(): token_id for token_id in range(tokenizer.get_vocab_size())}
    place = next(
        i for i in range(4, 16) if spelled[i] in ids and spelled[i].isascii() and spelled[i] not in spelled[:i]
    )
    stopped = ask(client, max_tokens=16, extra_body={"stop_token_ids": [ids[spelled[place]]]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == b"".join(spelled[:place]).decode("utf-8", errors="replace")
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == place + 1


def test_n_answers_differ_and_repeat_under_a_seed(model_stack: Gateway) -> None:
    with model_stack.client() as client:
        first = ask(client, n=3, temperature=2, seed=11)
        again = ask(client, n=3, temperature=2, seed=11)
    texts = [choice.message.content for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in sorted(again.choices, key=lambda choice: choice.index)]
    assert first.usage is not None
    assert first.usage.completion_tokens == 3 * 24


def test_n_answers_stream_side_by_side(client: openai.OpenAI) -> None:
    whole = ask(client, n=2, temperature=2, seed=5)
    chunks = ask_streaming(client, n=2, temperature=2, seed=5)
    by_index = {choice.index: choice.message.content for choice in whole.choices}
    assert {index: content_of(chunks, index) for index in (0, 1)} == by_index
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length", "length"]


def test_a_seed_fixes_the_answer_and_another_changes_it(model_stack: Gateway) -> None:
    with model_stack.client() as client:
        one = text_of(ask(client, temperature=2, seed=1))
        assert text_of(ask(client, temperature=2, seed=1)) == one
        assert text_of(ask(client, temperature=2, seed=2)) != one
        assert text_of(ask(client, temperature=2, seed=-1)) == text_of(ask(client, temperature=2, seed=-1)) != one


def test_answers_without_a_seed_differ(model_stack: Gateway) -> None:
    with model_stack.client() as client:
        assert len({text_of(ask(client, temperature=2)) for _ in range(3)}) == 3


def test_logprobs_describe_every_token(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=6, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert len(entries) == 6
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode("utf-8", errors="replace").startswith((choice.message.content or "").rstrip("\ufffd"))
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True)
        assert sum(math.exp(logprob) for logprob in likeliest) <= 1.0001


def test_greedy_logprobs_name_the_likeliest_token(model_stack: Gateway) -> None:
    with model_stack.client() as client:
        choice = ask(client, max_tokens=6, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    for entry in choice.logprobs.content or []:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.token == entry.top_logprobs[0].token


def test_streamed_logprobs_equal_the_collected_ones(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=6, logprobs=True, top_logprobs=2).choices[0].logprobs
    chunks = ask_streaming(client, max_tokens=6, logprobs=True, top_logprobs=2)
    pieces = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert whole is not None
    assert [entry for piece in pieces for entry in piece.content or []] == whole.content


def test_a_conversation_with_a_system_message_and_history(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        messages=[
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "Name an ocean."},
            {"role": "assistant", "content": "Pacific"},
            {"role": "user", "content": [{"type": "text", "text": "Another?"}]},
        ],
    )
    assert text_of(answer)


def test_the_served_model_is_listed_and_is_the_default(fake_stack: Gateway) -> None:
    with fake_stack.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.post(
            "/chat/completions", body={"messages": QUESTION, "max_tokens": 2, "temperature": 0}, cast_to=ChatCompletion
        )
    assert answer.model == MODEL


def test_special_tokens_in_user_text_are_plain_text(fake_stack: Gateway) -> None:
    """A control token spelled by a user is not the control token: it costs many tokens, not one."""
    with fake_stack.client() as client:
        plain = ask(client, max_tokens=1, messages=[{"role": "user", "content": "a"}]).usage
        spelled = ask(client, max_tokens=1, messages=[{"role": "user", "content": "a<｜end▁of▁sentence｜>"}]).usage
    assert plain is not None
    assert spelled is not None
    assert spelled.prompt_tokens > plain.prompt_tokens + 1
