"""Turns a Submit of the contract into a Request, or says which field is wrong and how to mend it.

The numbers come from `limits.json`, the table that the gateway reads too; defaults are those that the contract states.
Fields of the contract that this worker does not serve yet are refused by name, never ignored.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.output import RequestError
from baleen_worker.request import ErrorCode, Request, SamplingParams

if TYPE_CHECKING:
    from baleen_worker.pb import worker_pb2 as pb

REQUEST_ID_BYTES = 16


class Limit(msgspec.Struct, frozen=True):
    """One row of the table; bounds are inclusive unless `min_exclusive`."""

    min: float | None = None
    max: float | None = None
    min_exclusive: bool = False
    max_items: int | None = None
    max_bytes: int | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is in range; NaN never is."""
        if self.min is not None and not (value > self.min if self.min_exclusive else value >= self.min):
            return False
        return self.max is None or value <= self.max

    def describe(self) -> str:
        """The range in words."""
        low = f"{'greater than' if self.min_exclusive else 'at least'} {self.min:g}" if self.min is not None else ""
        high = f"at most {self.max:g}" if self.max is not None else ""
        return " and ".join(part for part in (low, high) if part)


class _Table(msgspec.Struct, frozen=True):
    fields: dict[str, Limit]


LIMITS: dict[str, Limit] = msgspec.json.decode(
    resources.files("baleen_worker.pb").joinpath("limits.json").read_bytes(), type=_Table
).fields

# Sampling fields that must be neutral, until they are built.
_NEUTRAL = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_tokens": 0}
_RANGED = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "thinking_budget",
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


class InvalidSubmitError(ValueError):
    """A Submit that cannot be served; `error` is what the gateway is told."""

    def __init__(self, field: str, message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.error = RequestError(code, f"{field}: {message}", field)


def to_request(submit: pb.Submit, stream: int, model: ModelFacts) -> Request:
    """The request that a Submit describes, all defaults filled in. Raises InvalidSubmitError."""
    _check_ranges(submit)
    _check_built(submit)
    prompt_ids = _prompt(submit, model)
    return Request(
        id=(stream, submit.key),
        prompt_token_ids=prompt_ids,
        sampling=_sampling(submit.sampling, len(prompt_ids), model),
        request_id=submit.request_id,
        attempt=submit.attempt,
        priority=submit.priority,
        deadline_ms=submit.deadline_ms if submit.HasField("deadline_ms") else None,
    )


def _check_ranges(submit: pb.Submit) -> None:
    sampling = submit.sampling
    for name in _RANGED:
        if sampling.HasField(name):
            _check_number(name, getattr(sampling, name))
    _check_number("priority", submit.priority)
    if submit.HasField("deadline_ms"):
        _check_number("deadline_ms", submit.deadline_ms)
    _check_count("stop_token_ids", len(sampling.stop_token_ids))
    _check_count("logit_bias", len(sampling.logit_bias))
    for entry in sampling.logit_bias:
        _check_number("logit_bias", entry.bias)
    _check_count("logit_processors", len(sampling.logit_processors))
    _check_bytes("cache_salt", "cache_salt", submit.cache_salt)
    kind = submit.WhichOneof("constraint")
    if kind is not None:
        _check_bytes(kind, "constraint", getattr(submit, kind))
    if len(submit.request_id) != REQUEST_ID_BYTES:
        raise InvalidSubmitError("request_id", f"{len(submit.request_id)} bytes, but it must be {REQUEST_ID_BYTES}")
    group = submit.sample_group
    if submit.HasField("sample_group") and group.index >= group.size:
        raise InvalidSubmitError("sample_group", f"index {group.index} must be below the group's size {group.size}")


def _check_built(submit: pb.Submit) -> None:
    sampling = submit.sampling
    for name, neutral in _NEUTRAL.items():
        if sampling.HasField(name) and getattr(sampling, name) != neutral:
            raise _unbuilt(name, f"only {neutral:g} is served")
    if sampling.logit_bias:
        raise _unbuilt("logit_bias")
    if sampling.HasField("thinking_budget"):
        raise _unbuilt("thinking_budget")
    if sampling.logit_processors:
        raise _unbuilt("logit_processors")
    kind = submit.WhichOneof("constraint")
    if kind is not None:
        raise _unbuilt(kind)
    if submit.HasField("disaggregation"):
        raise _unbuilt("disaggregation")
    if submit.dp_rank != 0:
        raise _unbuilt("dp_rank", "this head has rank 0 only")


def _prompt(submit: pb.Submit, model: ModelFacts) -> list[int]:
    prompt_ids = list(submit.prompt_token_ids)
    if not prompt_ids:
        raise InvalidSubmitError("prompt_token_ids", "the prompt is empty: send at least one token")
    largest = max(prompt_ids)
    if largest >= model.vocab_size:
        raise InvalidSubmitError(
            "prompt_token_ids", f"token {largest} does not exist: ids must be below {model.vocab_size}"
        )
    if len(prompt_ids) >= model.context_length:
        raise InvalidSubmitError(
            "prompt_token_ids",
            f"{len(prompt_ids)} tokens leave no room in a context of {model.context_length}: shorten the prompt",
        )
    return prompt_ids


def _sampling(sampling: pb.Sampling, prompt_len: int, model: ModelFacts) -> SamplingParams:
    room = model.context_length - prompt_len
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else room
    if max_tokens > room:
        raise InvalidSubmitError(
            "max_tokens",
            f"{max_tokens} after a prompt of {prompt_len} exceed the context of {model.context_length}: "
            f"ask for at most {room}",
        )
    stop_ids = tuple(sampling.stop_token_ids)
    if stop_ids and max(stop_ids) >= model.vocab_size:
        raise InvalidSubmitError(
            "stop_token_ids", f"token {max(stop_ids)} does not exist: ids must be below {model.vocab_size}"
        )
    if not sampling.ignore_eos:
        stop_ids += model.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.HasField("seed") else random.getrandbits(64),
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=stop_ids,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def _check_number(name: str, value: float) -> None:
    limit = LIMITS[name]
    if not limit.holds(value):
        raise InvalidSubmitError(name, f"{value:g} is out of range: it must be {limit.describe()}")


def _check_count(name: str, count: int) -> None:
    max_items = LIMITS[name].max_items
    if max_items is not None and count > max_items:
        raise InvalidSubmitError(name, f"{count} entries are too many: send at most {max_items}")


def _check_bytes(name: str, row: str, text: str) -> None:
    max_bytes = LIMITS[row].max_bytes
    if max_bytes is not None and len(text.encode()) > max_bytes:
        raise InvalidSubmitError(name, f"{len(text.encode())} bytes are too many: send at most {max_bytes}")


def _unbuilt(name: str, mend: str = "leave it out") -> InvalidSubmitError:
    return InvalidSubmitError(name, f"this worker does not serve it yet: {mend}", ErrorCode.UNIMPLEMENTED)
