"""Constrained answers through the engine, on the fake runner: whatever it says, the answer matches its constraint."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import pytest
from baleen_worker.messages import Abort
from baleen_worker.output import RequestError
from baleen_worker.request import Constraint, ErrorCode, FinishReason, Request, SamplingParams
from constrained_rig import EOS, Answers, check_json, draw_schema, make_request, schema_constraint, text_of

WAVE = 500  # requests at a time: no more may wait for their grammars than the room holds
FREE = 10_000  # keys of requests without a constraint
SHARED = [2, *range(100, 285)]  # ends shortly before a page does


@pytest.fixture
def answers() -> Iterator[Answers]:
    answers = Answers()
    yield answers
    answers.room.close()


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_answer_that_ends_matches_its_schema(count: int) -> None:
    """In so few pages that requests make way for each other, after prompts of which the cache knows most."""
    answers = Answers(num_pages=24, depth=2)
    g = random.Random(count)
    schemas = {key: draw_schema(g) for key in range(count)}
    for first in range(0, count, WAVE):
        wave = [(key, schemas[key]) for key in range(first, min(first + WAVE, count))]
        answers.ask(*(make_request(FREE + first + number, None) for number in range(8)))  # they outgrow the pages
        answers.ask(*(make_request(key, schema_constraint(schema), prompt=SHARED) for key, schema in wave))
        answers.finish()
    load = answers.scheduler.load
    answers.room.close()
    assert {key: end for key, end in answers.ends.items() if key < FREE and end is not FinishReason.STOP} == {}
    for key, schema in schemas.items():
        check_json(answers.tokens[key], schema)
    assert len({tuple(answers.tokens[key]) for key in schemas}) > count / 5, "the answers hardly differ"
    assert load.preemptions > 0
    assert load.cached_tokens >= 128 * (count - 64)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_prefix_hits_change_nothing(depth: int) -> None:
    """Long answers to prompts that begin alike, with pages for a few of them at a time."""
    g = random.Random(3)
    shared = [g.randrange(3, 400) for _ in range(200)]
    items = {"type": "array", "items": draw_schema(g), "minItems": 12, "maxItems": 14}
    requests = [
        Request(
            (1, key),
            shared + [key + 3] * (key % 3),
            SamplingParams(max_tokens=600, seed=key, stop_token_ids=(EOS,)),
            constraint=schema_constraint(items) if key % 4 else None,
        )
        for key in range(12)
    ]
    roomy, tight = Answers(), Answers(num_pages=24, depth=depth)
    try:
        for answers in (roomy, tight):
            for request in requests:
                answers.ask(request)
            answers.finish()
        assert tight.scheduler.load.preemptions > 0
        assert tight.scheduler.load.cached_tokens > 500
        assert tight.tokens == roomy.tokens
        for key in range(12):
            if key % 4:
                assert tight.ends[key] is FinishReason.STOP
                check_json(tight.tokens[key], items)
    finally:
        roomy.room.close()
        tight.room.close()


def test_regexes_and_grammars_are_matched(answers: Answers) -> None:
    patterns = {1: r"(\d{3}-){2}[a-f]{1,4}", 2: r"(krill|plankton)( and (krill|plankton)){0,2}", 3: "鯨?"}
    answers.ask(*(make_request(key, Constraint("regex", pattern)) for key, pattern in patterns.items()))
    answers.ask(make_request(4, Constraint("ebnf", 'root ::= "(" root ")" | "x"'), max_tokens=50))
    answers.finish()
    for key, pattern in patterns.items():
        assert answers.ends[key] is FinishReason.STOP
        assert re.fullmatch(pattern, text_of(answers.tokens[key]))
    text = text_of(answers.tokens[4])
    assert text.strip("()") in ("x", "")
    if answers.ends[4] is FinishReason.STOP:
        assert text.count("(") == text.count(")")


def test_a_dot_matches_no_line_break(answers: Answers) -> None:
    answers.ask(*(make_request(key, Constraint("regex", r"<.{3,9}>")) for key in range(15)))
    answers.finish()
    for key in range(15):
        assert re.fullmatch(r"<.{3,9}>", text_of(answers.tokens[key]))


@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 1), (1, 1), (2, 2), (1, 7), (3, None), (0, 40)])
def test_bounded_strings_keep_their_bounds(answers: Answers, least: int, most: int | None) -> None:
    bounds = {"minLength": least} if most is None else {"minLength": least, "maxLength": most}
    schema = {"type": "array", "items": {"type": "string", **bounds}, "minItems": 2, "maxItems": 2}
    answers.ask(*(make_request(key, schema_constraint(schema)) for key in range(6)))
    answers.finish()
    for key in range(6):
        if most is not None or answers.ends[key] is FinishReason.STOP:
            check_json(answers.tokens[key], schema)


def test_a_neighbour_is_not_constrained(answers: Answers) -> None:
    alone = Answers()
    alone.ask(make_request(5, None, max_tokens=30))
    alone.finish()
    answers.ask(make_request(5, None, max_tokens=30), *(make_request(k, Constraint("regex", "a+")) for k in (6, 7)))
    answers.finish()
    assert answers.tokens[5] == alone.tokens[5]
    alone.room.close()


def test_an_answer_cut_short_ends_for_its_length(answers: Answers) -> None:
    answers.ask(make_request(1, Constraint("regex", "a{300}"), max_tokens=20))
    answers.finish()
    assert answers.ends[1] is FinishReason.LENGTH
    assert set(text_of(answers.tokens[1])) == {"a"}


def test_a_grammar_that_leads_nowhere_ends_for_its_length(answers: Answers) -> None:
    """After "a" the grammar wants a character that exists in no class: nothing may follow, not even an end."""
    answers.ask(make_request(1, Constraint("ebnf", 'root ::= "a" never\nnever ::= "b" never'), max_tokens=100))
    answers.ask(make_request(2, Constraint("regex", "ab")))
    answers.finish()
    assert answers.ends[1] is FinishReason.LENGTH
    assert re.fullmatch("a?b*", text_of(answers.tokens[1]))
    assert answers.ends[2] is FinishReason.STOP


def test_a_constraint_begins_after_its_mark(answers: Answers) -> None:
    mark = 2002  # </think>
    constraint = Constraint("regex", "whale", after_id=mark)
    answers.ask(make_request(1, constraint, max_tokens=5), make_request(2, Constraint("regex", "whale")))
    answers.finish()
    assert answers.ends[1] is FinishReason.LENGTH, "the fake runner never says the mark"
    assert text_of(answers.tokens[2]) == "whale"


def test_a_bad_constraint_ends_its_request_with_the_cause(answers: Answers) -> None:
    answers.ask(
        make_request(1, schema_constraint({"type": "whale"})),
        make_request(2, Constraint("regex", "(a")),
        make_request(3, Constraint("ebnf", "root ::= nothing")),
        make_request(4, Constraint("structural_tag", "{}")),
        make_request(5, Constraint("regex", "ok")),
    )
    answers.finish()
    for key, field, words in ((1, "json_schema", "whale"), (2, "regex", "parenthesis"), (3, "ebnf", "nothing")):
        error = answers.ends[key]
        assert isinstance(error, RequestError)
        assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, field)
        assert words in error.message
        assert "cpp" not in error.message
    assert isinstance(answers.ends[4], RequestError)
    assert answers.ends[5] is FinishReason.STOP


def test_a_control_token_is_said_only_where_it_is_asked_for(answers: Answers) -> None:
    dsml = 2000
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<"},
                {"type": "token", "token": dsml},
                {"type": "const_string", "value": "x>"},
                {"type": "regex", "pattern": "[a-z ]{1,8}"},
            ],
        },
    }
    requests = [make_request(key, Constraint("structural_tag", json.dumps(tag))) for key in range(20)]
    literal = make_request(50, Constraint("regex", "<｜DSML｜x>"))
    answers.ask(*requests, literal)
    answers.finish()
    for key in range(20):
        assert answers.tokens[key].count(dsml) == 1
        assert re.fullmatch("<x>[a-z ]{1,8}", text_of(answers.tokens[key]))
    assert dsml not in answers.tokens[50], "text is not a mark"
    assert text_of(answers.tokens[50]) == "<｜DSML｜x>"


def test_an_abort_reaches_a_request_that_waits_for_its_grammar(answers: Answers) -> None:
    answers.ask(make_request(1, Constraint("regex", "a+")))
    answers.lines.commands.append(Abort([(1, 1)]))
    answers.finish()
    assert answers.ends[1] is FinishReason.ABORT
    assert answers.tokens[1] == []


def test_min_tokens_yields_to_the_grammar(answers: Answers) -> None:
    answers.ask(
        make_request(1, Constraint("regex", "a{0,40}"), min_tokens=12),
        make_request(2, Constraint("regex", "ab"), min_tokens=12),
    )
    answers.finish()
    assert len(answers.tokens[1]) > 12
    assert answers.ends[2] is FinishReason.STOP
    assert text_of(answers.tokens[2]) == "ab"
