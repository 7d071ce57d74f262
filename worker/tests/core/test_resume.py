"""An attempt that goes on after another one's tokens: it tells what would have come next, and nothing twice."""

from __future__ import annotations

import pytest
from baleen_worker.fake_runner import expected_tokens
from baleen_worker.output import RequestError
from baleen_worker.request import Constraint, ErrorCode, FinishReason, Request, SamplingParams
from constrained_rig import check_json
from engine_rig import VOCAB_SIZE, Rig, make_request
from test_constrained_engine import Answers

PROMPT = [token % VOCAB_SIZE for token in range(3, 150)]
SCHEMA = '{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 9}'


@pytest.mark.parametrize("num_resumed", [1, 44, 45, 46, 64, 99])
@pytest.mark.parametrize("with_cache", [True, False])
def test_it_goes_on_where_the_other_stopped(num_resumed: int, with_cache: bool) -> None:
    """The prompt of 147 tokens is cached from an earlier request; 45 more fill a page."""
    rig = Rig(with_cache=with_cache)
    rig.submit(make_request(1, PROMPT, 3))
    rig.finish()
    told = expected_tokens(PROMPT, num_resumed, VOCAB_SIZE)
    rig.submit(make_request(2, PROMPT, 100, logprobs=2, prompt_logprobs=1, resumed_token_ids=told))
    rig.finish()
    account = rig.ledger.accounts[1, 2]
    assert len(account.token_ids) == 100 - num_resumed
    assert account.prompt_logprobs == [], "the earlier attempt has told them"
    assert account.cached_tokens == (128 if with_cache else 0)


def test_cached_tokens_are_those_of_the_prompt() -> None:
    """Pages of the output that are found count as found, but are no part of the prompt."""
    rig = Rig()
    rig.submit(make_request(1, PROMPT, 150))
    rig.finish()
    told = expected_tokens(PROMPT, 140, VOCAB_SIZE)
    rig.submit(make_request(2, PROMPT, 150, resumed_token_ids=told))
    rig.finish()
    assert rig.ledger.accounts[1, 2].cached_tokens == len(PROMPT)


def test_it_goes_on_under_preemption_too() -> None:
    rig = Rig(num_pages=9, max_running=4, conservativeness=0.01)
    for key in range(1, 7):
        told = expected_tokens([key, *PROMPT[:70]], 10 * key, VOCAB_SIZE)
        rig.submit(make_request(key, [key, *PROMPT[:70]], 200, resumed_token_ids=told))
    rig.finish()
    assert rig.scheduler.load.preemptions > 0


def constrained(key: int, told: list[int], constraint: Constraint) -> Request:
    return Request(
        (1, key), [2], SamplingParams(max_tokens=400, seed=7, stop_token_ids=(1,)), b"", 0, 0, None, constraint,
        resumed_token_ids=told,
    )  # fmt: skip


@pytest.mark.parametrize("after_id", [None, 300])
def test_a_grammar_goes_on_from_the_token_where_it_was(after_id: int | None) -> None:
    """With `after_id`, the grammar begins behind the third token that was told."""
    constraint = Constraint("json_schema", SCHEMA, after_id)
    before = [] if after_id is None else [5, 6, after_id]
    answers = Answers()
    try:
        answers.ask(constrained(1, before, constraint))
        answers.finish()
        whole = answers.tokens[1]
        check_json(whole, {})
        cuts = range(1, len(whole))
        answers.ask(*(constrained(10 + cut, before + whole[:cut], constraint) for cut in cuts))
        answers.finish()
        assert all(answers.tokens[10 + cut] == whole[cut:] for cut in cuts)
        assert {answers.ends[10 + cut] for cut in cuts} == {FinishReason.STOP}
    finally:
        answers.room.close()


def test_tokens_that_the_grammar_cannot_have_let_through_are_refused() -> None:
    answers = Answers()
    try:
        answers.ask(constrained(1, [5, 6], Constraint("json_schema", SCHEMA)))
        answers.finish()
        error = answers.ends[1]
        assert isinstance(error, RequestError)
        assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "json_schema")
        assert "resumed_token_ids" in error.message
    finally:
        answers.room.close()
