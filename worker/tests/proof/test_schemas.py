"""Two thousand answers that must obey a schema, from a model and from a vocabulary of the released size.

Requests make way for each other in few pages, and most of each prompt is cached. The micro model samples at random, so
nothing but the masks gives an answer its form. The fake runner, which picks from a mask by a hash, stands for a model
whose vocabulary is `BALEEN_TEST_VOCABULARY`: a folder with a tokenizer.json and a config.json.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from baleen_worker.config import WorkerConfig
from baleen_worker.request import FinishReason
from baleen_worker.runner import build_runner
from constrained_rig import MICRO, MICRO_VOCABULARY, Answers, Vocabulary, draw_schema, make_request, schema_constraint

COUNTS = [120, pytest.param(2000, marks=pytest.mark.slow)]
WAVE = 200
NUM_PAGES = 12
SHARED = [2, *range(100, 285)]  # ends shortly before a page does, so that answers outgrow the pages


def ask_all(answers: Answers, vocabulary: Vocabulary, schemas: dict[int, Any], **fields: Any) -> int:
    """Asks in waves and checks every answer; returns how many ended by themselves. The others came to their limit."""
    keys = list(schemas)
    num_ended = 0
    for first in range(0, len(keys), WAVE):
        wave = keys[first : first + WAVE]
        requests = [(key, schema_constraint(schemas[key])) for key in wave]
        answers.ask(*(make_request(key, constraint, prompt=SHARED, **fields) for key, constraint in requests))
        answers.finish()
        for key in wave:
            assert isinstance(answers.ends[key], FinishReason), answers.ends[key]
            if answers.ends[key] is FinishReason.STOP:
                vocabulary.check_json(answers.tokens[key], schemas[key])
                num_ended += 1
    assert answers.scheduler.load.preemptions > 0
    assert answers.scheduler.load.cached_tokens >= 128 * (len(keys) - 64)
    return num_ended


@pytest.mark.parametrize("count", COUNTS)
def test_answers_of_the_micro_model_obey_their_schemas(count: int) -> None:
    config = WorkerConfig(MICRO, device="cpu", max_total_tokens=64 * NUM_PAGES, max_running_requests=32)
    answers = Answers(built=build_runner(config))
    g = random.Random(count)
    # A tenth more than are needed, for those that a random choice of tokens keeps from their end.
    schemas = {key: draw_schema(g) for key in range(count + count // 10)}
    try:
        assert ask_all(answers, MICRO_VOCABULARY, schemas, max_tokens=120) >= count
    finally:
        answers.room.close()
    assert len({tuple(answers.tokens[key]) for key in schemas}) > count / 5, "the answers hardly differ"


@pytest.fixture(scope="module")
def large() -> Vocabulary:
    folder = os.environ.get("BALEEN_TEST_VOCABULARY")
    if folder is None:
        pytest.skip("BALEEN_TEST_VOCABULARY names no folder with a tokenizer.json")
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    return Vocabulary(Path(folder), config["vocab_size"], config["eos_token_id"])


@pytest.mark.slow
def test_answers_in_a_large_vocabulary_obey_their_schemas(large: Vocabulary) -> None:
    g = random.Random(5)
    drawn = [draw_schema(g) for _ in range(150)]  # compiling takes a while in a large vocabulary
    answers = Answers(num_pages=NUM_PAGES, vocabulary=large, depth=2)
    try:
        num_ended = ask_all(answers, large, {key: drawn[key % len(drawn)] for key in range(2200)}, max_tokens=120)
    finally:
        answers.room.close()
    assert num_ended >= 2000


@pytest.mark.slow
@pytest.mark.parametrize("most", [10, 40, 128])
def test_a_bounded_string_keeps_its_bound_in_a_large_vocabulary(large: Vocabulary, most: int) -> None:
    schema = {"type": "string", "minLength": most - 1, "maxLength": most}
    answers = Answers(vocabulary=large)
    try:
        answers.ask(*(make_request(key, schema_constraint(schema)) for key in range(16)))
        answers.finish()
    finally:
        answers.room.close()
    for key in range(16):
        assert answers.ends[key] is FinishReason.STOP
        jsonschema.validate(json.loads(large.text_of(answers.tokens[key][:-1])), schema)
