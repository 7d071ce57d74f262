"""The generated texts: the same each time, encoded as V3.2 encodes, and with nothing of evaluation's in training."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from baleen_eval.texts.arith import arith
from baleen_eval.texts.conversation import Call, Conversation, Message
from baleen_eval.texts.retrieval import needle, track
from baleen_eval.texts.tools import make_tools, tools
from baleen_eval.texts.words import code, is_eval, made_up_word
from tokenizers import Tokenizer

from models.data.chat import DSML, EOS, render
from models.data.mixture import Encoder, Shares, conversations, rows
from models.data.tokenizer import make_tokenizer
from models.train.checkpoint import write_settings

MICRO = Path(__file__).parents[1] / "micro"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO / "tokenizer.json"))


def text_of(conversation: Conversation) -> str:
    return "".join(segment.text for segment in render(conversation))


def test_settings_and_tokenizer_are_what_the_code_makes(tmp_path: Path) -> None:
    write_settings(make_tokenizer(), tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (MICRO / made.name).read_bytes(), made.name


def test_batches_repeat_with_the_seed(tokenizer: Tokenizer) -> None:
    def first(seed: int) -> list[np.ndarray]:
        return [ids for ids, _ in itertools.islice(rows(tokenizer, seed=seed, row_len=700), 3)]

    assert all(map(np.array_equal, first(5), first(5)))
    assert not any(map(np.array_equal, first(5), first(6)))


def test_rows_are_full_and_weigh_the_models_words_most(tokenizer: Tokenizer) -> None:
    for ids, weights in itertools.islice(rows(tokenizer, seed=1, row_len=500), 5):
        assert ids.shape == weights.shape == (501,)
        assert set(np.unique(weights)) <= {np.float32(0.05), np.float32(1.0)}
        assert 0 < (weights == 1).sum() < 400


def test_cutting_into_sentences_changes_no_token(tokenizer: Tokenizer) -> None:
    encode = Encoder(tokenizer)
    for conversation in itertools.islice(conversations(random.Random(3), 600, Shares()), 150):
        text = text_of(conversation)
        assert encode(conversation)[0] == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_words_and_numbers_are_split_for_good() -> None:
    rng = random.Random(0)
    train = {made_up_word(rng, "train") for _ in range(2000)} | {str(code(rng, "train")) for _ in range(2000)}
    evaluation = {made_up_word(rng, "eval") for _ in range(2000)} | {str(code(rng, "eval")) for _ in range(2000)}
    assert not train & evaluation
    assert len(evaluation) > 2000


def test_training_names_no_tool_word_or_code_of_evaluation() -> None:
    for conversation in itertools.islice(conversations(random.Random(9), 800, Shares()), 300):
        words = re.findall(r"[A-Z]?(?:(?:[bdfgklmnprstvz]|dr|tr)[aeiou]){3}\b", text_of(conversation))
        assert not [word for word in words if is_eval(word)], words
        for tool in conversation.messages[0].tools:
            assert not is_eval(tool["name"])


def test_evaluation_takes_only_its_own() -> None:
    rng = random.Random(1)
    assert all(is_eval(tool["name"]) for tool in make_tools(rng, "eval", 20))
    text = text_of(needle(rng, "eval", 600, num_needles=8))
    assert all(is_eval(name) for name in re.findall(r"of ([A-Z]\w+) is", text))
    assert all(int(number) % 7 == 3 for number in re.findall(r"is (\d+)\.", text))


def test_problems_of_evaluation_are_not_in_training() -> None:
    rng = random.Random(2)

    def sums(split: str, count: int) -> set[str]:
        return {arith(rng, split).messages[-1].reasoning for _ in range(count)}  # type: ignore[arg-type]

    assert not sums("train", 3000) & sums("eval", 3000)


def test_answers_follow_from_the_text() -> None:
    rng = random.Random(4)
    for _ in range(30):
        conversation = needle(rng, "train", 400, depth=0.5)
        question, answer = conversation.messages[-2].content, conversation.messages[-1].content
        _, kind, name, value = re.fullmatch(r"(The (\w+) of (.+) is (\d+)\.)", answer).groups()  # type: ignore[union-attr]
        assert f"The {kind} of {name} is {value}." in question or f"{name} has the {kind} {value}." in question
    for _ in range(30):
        conversation = track(rng, "train", 400)
        text, value = conversation.messages[-2].content, conversation.messages[-1].content.split()[-1].rstrip(".")
        name = re.search(r"value of (\w+)\?", text).group(1)  # type: ignore[union-attr]
        known = dict(re.findall(r"Let (\w+) be (\w+)\.", text))
        while name in known:
            name = known[name]
        assert name == value
    for _ in range(60):
        message = arith(rng, "train").messages[-1]
        for left, operator, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", message.reasoning):
            assert eval(f"{left} {operator} {right}") == int(result)


def test_calls_are_written_as_v32_writes_them() -> None:
    call = Call("get_weather", {"city": "Oslo", "days": 3, "tags": ["a", "b"], "exact": True})
    schema = {"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object"}}
    conversation = Conversation(
        (
            Message("system", "Be brief.", tools=(schema,)),
            Message("user", "Oslo?"),
            Message("assistant", calls=(call, call)),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "Done."),
        )
    )
    text = text_of(conversation)
    assert text.startswith("<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    assert f"<functions>\n{json.dumps(schema)}\n</functions>\n<｜User｜>Oslo?<｜Assistant｜></think>\n\n<{DSML}" in text
    assert f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n' in text
    assert f'<{DSML}parameter name="tags" string="false">["a", "b"]</{DSML}parameter>\n' in text
    assert f'<{DSML}parameter name="exact" string="false">true</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}inv' in text
    results = "<function_results>\n<result>1</result>\n<result>2</result>\n</function_results>\n\n</think>Done."
    assert text.endswith(f"</{DSML}invoke>\n</{DSML}function_calls>{EOS}\n\n{results}{EOS}")


def test_reasoning_of_earlier_turns_is_not_shown() -> None:
    turns = [("user", "a", ""), ("assistant", "b", "first"), ("user", "c", ""), ("assistant", "d", "second")]
    messages = tuple(Message(role, content, reasoning=reasoning) for role, content, reasoning in turns)
    text = text_of(Conversation(messages, thinking=True))
    assert text.endswith(f"a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>second</think>d{EOS}")
    assert "first" not in text


def test_requests_name_what_the_calls_need() -> None:
    rng = random.Random(8)
    for _ in range(40):
        conversation = tools(rng, "eval")
        request = next(message.content for message in conversation.messages if message.role == "user")
        for message in conversation.messages:
            for call in message.calls:
                assert all(str(value) in request for value in call.arguments.values() if isinstance(value, str))
