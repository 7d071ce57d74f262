"""Raw completions: strings and token ids as prompts, taken as given, and scoring of a prompt."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from harness.processes import MICRO_MODEL, Gateway
from openai.types import Completion
from tokenizers import Tokenizer

MODEL = "micro"
TEXT = "The whale opened its mouth and the sea went in."
INDEX_TOPK = 256  # the micro model's: so many keys are attended to


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocab_size() -> int:
    return json.loads((MICRO_MODEL / "config.json").read_text("utf-8"))["vocab_size"]


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Completion:
    """One continuation, greedy and short unless `options` say otherwise."""
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    return client.completions.create(prompt=prompt, **(settings | options), extra_body={"ignore_eos": True})


def test_a_completion_has_the_shape_clients_expect(client: openai.OpenAI) -> None:
    answer = complete(client, TEXT)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_a_stream_is_the_completion_in_pieces(client: openai.OpenAI) -> None:
    whole = complete(client, TEXT).choices[0].text
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=TEXT, temperature=0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole


def test_a_string_and_its_token_ids_are_the_same_prompt(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    by_text, by_ids = complete(client, TEXT), complete(client, ids)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)
    assert by_text.usage == by_ids.usage


def test_several_prompts_answer_in_order(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [TEXT, "Krill", "Deep water"]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    together = complete(client, prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    assert [choice.text for choice in complete(client, ids).choices] == alone


def test_n_completions_of_several_prompts_are_grouped_by_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, [TEXT, "Krill"], n=2, temperature=2, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = complete(client, "Krill", n=2, temperature=2, seed=3)
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]


def test_every_id_below_the_vocabulary_size_is_a_prompt(client: openai.OpenAI, vocab_size: int) -> None:
    """Also ids the tokenizer has no row for, and control tokens."""
    last = vocab_size - 1
    answer = complete(client, [0, 1, last, last // 2, last])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_an_id_beyond_the_vocabulary_is_refused(client: openai.OpenAI, vocab_size: int) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, [1, vocab_size])
    assert refused.value.param == "prompt[1]"


def test_echo_puts_the_prompt_before_the_continuation(client: openai.OpenAI) -> None:
    alone = complete(client, TEXT).choices[0].text
    assert complete(client, TEXT, echo=True).choices[0].text == TEXT + alone


def test_echo_without_new_tokens_scores_the_prompt(model_stack: Gateway, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    with model_stack.client() as client:
        answer = complete(client, ids, echo=True, max_tokens=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == TEXT
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert "".join(scores.tokens) == TEXT
    assert scores.token_logprobs is not None
    assert len(scores.token_logprobs) == len(ids)
    assert scores.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scores.token_logprobs[1:])
    assert scores.text_offset == [
        *itertools.accumulate((len(token) for token in scores.tokens[:-1]), initial=0),
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_logprobs_list_alternatives(model_stack: Gateway) -> None:
    with model_stack.client() as client:
        scores = complete(client, TEXT, logprobs=3, max_tokens=5).choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert len(scores.token_logprobs) == len(scores.top_logprobs) == 5
    for logprob, alternatives in zip(scores.token_logprobs, scores.top_logprobs, strict=True):
        assert logprob == max(alternatives.values())


def test_a_long_prompt_is_chunked_and_answers_the_same(model_stack: Gateway, tokenizer: Tokenizer) -> None:
    """The prompt is longer than a step's token budget; scoring it token by token must not notice."""
    ids = list(itertools.islice(itertools.cycle(tokenizer.encode(TEXT, add_special_tokens=False).ids), 2600))
    with model_stack.client() as client:
        whole = complete(client, ids, echo=True, max_tokens=0, logprobs=0).choices[0].logprobs
        part = complete(client, ids[:700], echo=True, max_tokens=0, logprobs=0).choices[0].logprobs
    assert whole is not None
    assert part is not None
    assert whole.token_logprobs is not None
    assert part.token_logprobs is not None
    assert whole.token_logprobs[1:INDEX_TOPK] == pytest.approx(part.token_logprobs[1:INDEX_TOPK], abs=1e-4)
    # Further on keys are selected, and where two score alike, the rounding of another batch may choose the other one.
    later = list(zip(whole.token_logprobs[INDEX_TOPK:700], part.token_logprobs[INDEX_TOPK:], strict=True))
    assert all(one == pytest.approx(other, abs=0.05) for one, other in later)
    assert sum(one != pytest.approx(other, abs=1e-4) for one, other in later) <= 5


def test_a_prompt_that_fills_the_context_leaves_one_token(fake_stack: Gateway) -> None:
    with fake_stack.client() as client:
        card = client.models.retrieve(MODEL)
        context = (card.model_extra or {})["max_model_len"]
        answer = complete(client, [5] * (context - 1), max_tokens=1)
        assert answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, [5] * (context + 1), max_tokens=1)
    assert refused.value.param == "prompt"
