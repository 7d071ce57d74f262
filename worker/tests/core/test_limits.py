"""Every number of a Submit is checked, every default is the contract's, and nothing unbuilt is ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from baleen_worker.limits import (
    CONSTRAINT_FEATURES,
    LIMITS,
    SAMPLING_FEATURES,
    InvalidSubmitError,
    ModelFacts,
    to_request,
)
from baleen_worker.pb import worker_pb2 as pb
from baleen_worker.request import Constraint, ErrorCode, Request, SamplingParams, ThinkingBudget

MODEL = ModelFacts(vocab_size=1000, context_length=200, eos_token_ids=(2, 3))
ABLE = ModelFacts(
    vocab_size=1000,
    context_length=200,
    eos_token_ids=(2, 3),
    think_ids=(11, 12),
    logit_processors=("upper", "lower"),
    features=SAMPLING_FEATURES + CONSTRAINT_FEATURES,
)
CONTRACT = Path(__file__).resolve().parents[3] / "proto/baleen/worker/v1/limits.json"


def submit(sampling: dict[str, Any] | None = None, **fields: Any) -> pb.Submit:
    values: dict[str, Any] = {"key": 9, "request_id": bytes(range(16)), "prompt_token_ids": [5, 6, 7]} | fields
    return pb.Submit(sampling=pb.Sampling(**(sampling or {})), **values)


def refusal(message: pb.Submit, model: ModelFacts = MODEL) -> tuple[ErrorCode, str]:
    with pytest.raises(InvalidSubmitError) as caught:
        to_request(message, 1, model)
    error = caught.value.error
    assert error.message.startswith(f"{error.field}: ")
    assert len(error.message) > len(error.field) + 10
    return error.code, error.field


def test_defaults_are_those_of_the_contract() -> None:
    request = to_request(submit(), 4, MODEL)
    sampling = request.sampling
    assert request == Request(
        id=(4, 9), prompt_token_ids=[5, 6, 7], sampling=sampling, request_id=bytes(range(16)), deadline_ms=None
    )
    assert sampling == SamplingParams(max_tokens=197, seed=sampling.seed, stop_token_ids=(2, 3))


def test_absent_seeds_differ() -> None:
    assert len({to_request(submit(), 1, MODEL).sampling.seed for _ in range(20)}) == 20


def test_every_field_arrives() -> None:
    given = {
        "max_tokens": 10,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "stop_token_ids": [8, 9],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_tokens": 0,
    }
    message = submit(given, attempt=3, priority=-5, deadline_ms=1500, cache_salt="tenant", trace_parent="00-ab-cd-01")
    message.sample_group.CopyFrom(pb.SampleGroup(group_id=b"g", index=1, size=2))
    request = to_request(message, 1, MODEL)
    assert request.sampling == SamplingParams(
        max_tokens=10,
        seed=2**64 - 1,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        stop_token_ids=(8, 9),
        logprobs=0,
        prompt_logprobs=20,
    )
    assert (request.attempt, request.priority, request.deadline_ms) == (3, -5, 1500)


def test_the_optional_fields_arrive_where_the_worker_has_the_ability() -> None:
    given: dict[str, Any] = {
        "max_tokens": 10,
        "seed": 1,
        "min_tokens": 10,
        "repetition_penalty": 1.5,
        "frequency_penalty": -2.0,
        "presence_penalty": 0.5,
        "logit_bias": [pb.LogitBias(token_id=999, bias=-100), pb.LogitBias(token_id=0, bias=2.5)],
        "thinking_budget": 0,
        "logit_processors": ["lower", "upper"],
    }
    request = to_request(submit(given, regex="a+", starts_in_reasoning=True), 1, ABLE)
    assert request.sampling == SamplingParams(
        max_tokens=10,
        seed=1,
        stop_token_ids=(2, 3),
        min_tokens=10,
        repetition_penalty=1.5,
        frequency_penalty=-2.0,
        presence_penalty=0.5,
        logit_bias=((999, -100.0), (0, 2.5)),
        thinking=ThinkingBudget(0, open_id=11, close_id=12, starts_open=True),
        logit_processors=("lower", "upper"),
    )
    assert request.constraint == Constraint("regex", "a+", after_id=12)
    assert to_request(submit(ebnf="x"), 1, ABLE).constraint == Constraint("ebnf", "x")


def without(model: ModelFacts, **fields: Any) -> ModelFacts:
    return dataclasses.replace(model, **fields)


CONTRADICTIONS: list[tuple[str, pb.Submit, ModelFacts]] = [
    ("min_tokens", submit({"max_tokens": 3, "min_tokens": 4}), ABLE),
    ("logit_bias", submit({"logit_bias": [pb.LogitBias(token_id=1000, bias=1)]}), ABLE),
    ("logit_bias", submit({"logit_bias": [pb.LogitBias(token_id=5, bias=1)] * 2}), ABLE),
    ("logit_processors", submit({"logit_processors": ["upper", "middle"]}), ABLE),
    ("logit_processors", submit({"logit_processors": ["upper", "upper"]}), ABLE),
    ("logit_processors", submit({"logit_processors": ["upper"]}), without(ABLE, logit_processors=())),
    ("thinking_budget", submit({"thinking_budget": 5}), without(ABLE, think_ids=None)),
    ("ignore_eos", submit({"ignore_eos": True}, json_schema="{}"), ABLE),
    ("starts_in_reasoning", submit(json_schema="{}", starts_in_reasoning=True), without(ABLE, think_ids=None)),
]


@pytest.mark.parametrize(("field", "message", "model"), CONTRADICTIONS, ids=lambda part: str(part)[:20])
def test_what_cannot_be_meant_is_refused_by_name(field: str, message: pb.Submit, model: ModelFacts) -> None:
    assert refusal(message, model) == (ErrorCode.INVALID_ARGUMENT, field)


NAN = float("nan")
BAD_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", NAN),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", float("inf")),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 10.5),
    ("repetition_penalty", NAN),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", NAN),
    ("presence_penalty", -2.5),
    ("presence_penalty", NAN),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("stop_token_ids", [1] * 65),
    ("stop_token_ids", [1000]),
    ("logit_bias", [pb.LogitBias(token_id=1, bias=101)]),
    ("logit_bias", [pb.LogitBias(token_id=1, bias=NAN)]),
    ("logit_bias", [pb.LogitBias(token_id=1, bias=1)] * 301),
    ("logit_processors", ["x"] * 9),
    ("max_tokens", 198),
    ("max_tokens", 2**32 - 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_bad_sampling_is_refused_by_name(field: str, value: Any) -> None:
    assert refusal(submit({field: value})) == (ErrorCode.INVALID_ARGUMENT, field)


BAD_SUBMIT: list[tuple[str, Any]] = [
    ("prompt_token_ids", []),
    ("prompt_token_ids", [999, 1000]),
    ("prompt_token_ids", [2**32 - 1]),
    ("prompt_token_ids", [1] * 200),
    ("prompt_token_ids", [1] * 5000),
    ("request_id", b""),
    ("request_id", bytes(17)),
    ("priority", 1001),
    ("priority", -1001),
    ("deadline_ms", 0),
    ("deadline_ms", 86_400_001),
    ("cache_salt", "x" * 257),
    ("cache_salt", "é" * 129),
    ("json_schema", "x" * 262145),
    ("sample_group", pb.SampleGroup(index=2, size=2)),
    ("resumed_token_ids", [5, 1000]),
    ("resumed_token_ids", [5] * 197),
    ("resumed_token_ids", [5, 2, 5]),
]


@pytest.mark.parametrize(("field", "value"), BAD_SUBMIT)
def test_bad_submits_are_refused_by_name(field: str, value: Any) -> None:
    assert refusal(submit(**{field: value})) == (ErrorCode.INVALID_ARGUMENT, field)


UNBUILT: list[pb.Submit] = [
    submit({"repetition_penalty": 1.1}),
    submit({"frequency_penalty": 0.1}),
    submit({"presence_penalty": -0.1}),
    submit({"min_tokens": 1}),
    submit({"thinking_budget": 0}),
    submit({"logit_bias": [pb.LogitBias(token_id=1, bias=1)]}),
    submit({"logit_processors": ["x"]}),
    submit(json_schema="{}"),
    submit(regex="a"),
    submit(ebnf="root ::= 'a'"),
    submit(structural_tag="{}"),
    submit(disaggregation=pb.DisaggregationLeg(role=pb.ROLE_PREFILL)),
    submit(dp_rank=1),
]


@pytest.mark.parametrize("message", UNBUILT, ids=lambda message: str(refusal(message)[1]))
def test_unbuilt_fields_are_refused_by_name(message: pb.Submit) -> None:
    code, field = refusal(message)
    assert code is ErrorCode.UNIMPLEMENTED
    named = {descriptor.name for descriptor, _ in [*message.ListFields(), *message.sampling.ListFields()]}
    assert field in named


def test_bounds_are_inclusive() -> None:
    for sampling in (
        {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "logprobs": 20, "max_tokens": 197},
        {"temperature": 0.0, "top_p": 1e-6, "min_p": 0.0, "logprobs": 0, "max_tokens": 0, "seed": 0},
        {"stop_token_ids": [999] * 64, "top_k": 2**32 - 1},
    ):
        to_request(submit(sampling), 1, MODEL)
    to_request(submit(prompt_token_ids=[999] * 199, priority=1000, deadline_ms=86_400_000), 1, MODEL)


def test_the_package_carries_the_contracts_own_table() -> None:
    fields = json.loads(CONTRACT.read_text())["fields"]
    assert LIMITS.keys() == fields.keys()
    sampling_fields = set(pb.Sampling.DESCRIPTOR.fields_by_name) - {"ignore_eos"}
    assert sampling_fields <= LIMITS.keys(), "a sampling field has no limit"
