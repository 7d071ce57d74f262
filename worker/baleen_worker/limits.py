"""Turns a Submit of the contract into a Request, or says which field is wrong and how to mend it.

The numbers come from `limits.json`, the table that the gateway reads too; defaults are those that the contract states.
Fields of the contract that this worker does not serve are refused by name, never ignored.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from baleen_worker.output import RequestError
from baleen_worker.request import Constraint, ErrorCode, Leg, Request, Role, SamplingParams, ThinkingBudget
from baleen_worker.vocabulary import TOKENIZER_FILE, read_control_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baleen_worker.config import WorkerConfig
    from baleen_worker.model_config import ModelConfig
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

# Abilities that need the model's logits, and those that need to know which bytes its tokens are.
SAMPLING_FEATURES = ("penalties", "logit_bias", "min_tokens", "thinking_budget", "logit_processors")
CONSTRAINT_FEATURES = ("json_schema", "regex", "ebnf", "structural_tag")
# Fields that ask for an ability unless they are neutral.
_OPTIONAL: dict[str, tuple[str, float | None]] = {
    "repetition_penalty": ("penalties", 1.0),
    "frequency_penalty": ("penalties", 0.0),
    "presence_penalty": ("penalties", 0.0),
    "min_tokens": ("min_tokens", 0),
    "thinking_budget": ("thinking_budget", None),
}
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
    """What a request is checked against.

    `think_ids`: the ids of `<think>` and `</think>`, None when the model's tokenizer lacks them. `logit_processors`:
    names of the plugins. `features`: optional abilities of the worker, as GetInfo lists them. `role`: which legs it
    serves; whole requests are served by all.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    think_ids: tuple[int, int] | None = None
    logit_processors: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    role: Role = Role.UNIFIED


def model_facts(model: ModelConfig, worker: WorkerConfig, context_length: int) -> ModelFacts:
    """What requests to a model are checked against. Raises ValueError when its tokenizer.json cannot be read."""
    control_ids = read_control_tokens(worker.model_dir)
    features = ["prompt_logprobs", "resume"]
    if worker.runner != "fake":  # which has no logits to change
        features += SAMPLING_FEATURES
    if (worker.model_dir / TOKENIZER_FILE).is_file():
        features += CONSTRAINT_FEATURES
    if worker.disaggregation is not None:
        features.append("probe_transfer")
    open_id, close_id = control_ids.get("<think>"), control_ids.get("</think>")
    return ModelFacts(
        vocab_size=model.vocab_size,
        context_length=context_length,
        eos_token_ids=tuple(model.eos_token_ids),
        think_ids=None if open_id is None or close_id is None else (open_id, close_id),
        logit_processors=tuple(name for name, _ in worker.logit_processors),
        features=tuple(features),
        role=_role(worker),
    )


class InvalidSubmitError(ValueError):
    """A Submit that cannot be served; `error` is what the gateway is told."""

    def __init__(self, field: str, message: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.error = RequestError(code, f"{field}: {message}", field)


def to_request(submit: pb.Submit, stream: int, model: ModelFacts) -> Request:
    """The request that a Submit describes, all defaults filled in. Raises InvalidSubmitError."""
    _check_ranges(submit)
    _check_built(submit, model)
    prompt_ids = _prompt(submit, model)
    sampling = _sampling(submit, len(prompt_ids), model)
    return Request(
        id=(stream, submit.key),
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        constraint=_constraint(submit, model),
        request_id=submit.request_id,
        attempt=submit.attempt,
        priority=submit.priority,
        deadline_ms=submit.deadline_ms if submit.HasField("deadline_ms") else None,
        cache_salt=submit.cache_salt,
        group_id=submit.sample_group.group_id if submit.sample_group.size > 1 else b"",
        resumed_token_ids=_resumed(submit, sampling, model),
        leg=_leg(submit, sampling, model),
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


def _check_built(submit: pb.Submit, model: ModelFacts) -> None:
    sampling = submit.sampling
    for name, (feature, neutral) in _OPTIONAL.items():
        if feature not in model.features and sampling.HasField(name) and getattr(sampling, name) != neutral:
            raise _unbuilt(name)
    for name in ("logit_bias", "logit_processors"):
        if name not in model.features and getattr(sampling, name):
            raise _unbuilt(name)
    kind = submit.WhichOneof("constraint")
    if kind is not None and kind not in model.features:
        raise _unbuilt(kind)
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


def _sampling(submit: pb.Submit, prompt_len: int, model: ModelFacts) -> SamplingParams:
    sampling = submit.sampling
    room = model.context_length - prompt_len
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else room
    if max_tokens > room:
        raise InvalidSubmitError(
            "max_tokens",
            f"{max_tokens} after a prompt of {prompt_len} exceed the context of {model.context_length}: "
            f"ask for at most {room}",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidSubmitError(
            "min_tokens", f"{sampling.min_tokens} exceed max_tokens, which is {max_tokens}: ask for at most that many"
        )
    stop_ids = tuple(sampling.stop_token_ids)
    _check_ids("stop_token_ids", stop_ids, model)
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
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=_logit_bias(sampling, model),
        min_tokens=sampling.min_tokens,
        thinking=_thinking(submit, model),
        logit_processors=_logit_processors(sampling, model),
    )


def _role(worker: WorkerConfig) -> Role:
    if worker.disaggregation is None:
        return Role.UNIFIED
    return Role.PREFILL if worker.disaggregation.prefills else Role.DECODE


def _leg(submit: pb.Submit, sampling: SamplingParams, model: ModelFacts) -> Leg | None:
    if not submit.HasField("disaggregation"):
        return None
    name, leg = "disaggregation", submit.disaggregation
    if model.role is Role.UNIFIED:
        raise _unbuilt(name, "it is started without --disaggregation-mode, send it the request without legs")
    if leg.role != model.role.value:
        raise InvalidSubmitError(name, f"this is a {model.role.name.lower()} worker: send it the other leg")
    if not submit.sampling.HasField("seed"):
        raise InvalidSubmitError("seed", "the legs of a request need one, and the same one: draw it before submitting")
    if sampling.max_tokens == 0:
        raise InvalidSubmitError(
            "max_tokens",
            "nothing is to be generated from the pages of a leg: send a prompt that is scored to one worker",
        )
    if model.role is Role.PREFILL:
        return Leg(Role.PREFILL)
    check_peer(name, leg.peer)
    return Leg(Role.DECODE, leg.peer.address, leg.peer_boot_epoch, leg.peer.dp_rank)


def check_peer(field: str, peer: pb.TransferEndpoint) -> None:
    """Raises InvalidSubmitError for what is no place where a prefill worker serves pages."""
    host, _, port = peer.address.rpartition(":")
    if peer.backend != "tcp" or not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidSubmitError(
            field, "its peer must be one that GetInfo of a prefill worker names: backend tcp, host:port"
        )


def _resumed(submit: pb.Submit, sampling: SamplingParams, model: ModelFacts) -> list[int]:
    """Tokens after which an answer goes on, none of which has ended it."""
    token_ids = list(submit.resumed_token_ids)
    name = "resumed_token_ids"
    _check_ids(name, token_ids, model)
    if token_ids and len(token_ids) >= sampling.max_tokens:
        raise InvalidSubmitError(
            name,
            f"{len(token_ids)} tokens are all that max_tokens {sampling.max_tokens} allows: the answer is complete",
        )
    last = next((token_id for token_id in token_ids if token_id in sampling.stop_token_ids), None)
    if last is not None:
        raise InvalidSubmitError(name, f"token {last} has ended the answer: nothing comes after it")
    return token_ids


def _logit_bias(sampling: pb.Sampling, model: ModelFacts) -> tuple[tuple[int, float], ...]:
    ids = [entry.token_id for entry in sampling.logit_bias]
    _check_ids("logit_bias", ids, model)
    twice = next((token_id for token_id, count in Counter(ids).items() if count > 1), None)
    if twice is not None:
        raise InvalidSubmitError("logit_bias", f"token {twice} is listed twice: keep one entry for each token")
    return tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias)


def _thinking(submit: pb.Submit, model: ModelFacts) -> ThinkingBudget | None:
    if not submit.sampling.HasField("thinking_budget"):
        return None
    open_id, close_id = _think_ids("thinking_budget", model)
    return ThinkingBudget(submit.sampling.thinking_budget, open_id, close_id, submit.starts_in_reasoning)


def _logit_processors(sampling: pb.Sampling, model: ModelFacts) -> tuple[str, ...]:
    names = tuple(sampling.logit_processors)
    unknown = next((name for name in names if name not in model.logit_processors), None)
    if unknown is not None:
        offer = f"choose from {', '.join(sorted(model.logit_processors))}" if model.logit_processors else "it has none"
        raise InvalidSubmitError("logit_processors", f"this worker has no plugin named {unknown[:64]!r}: {offer}")
    if len(set(names)) < len(names):
        raise InvalidSubmitError("logit_processors", "a plugin is named twice: name each once")
    return names


def _constraint(submit: pb.Submit, model: ModelFacts) -> Constraint | None:
    kind = submit.WhichOneof("constraint")
    if kind is None:
        return None
    if submit.sampling.ignore_eos:
        raise InvalidSubmitError(
            "ignore_eos", f"an answer under {kind} ends where the constraint does: leave one of them out"
        )
    close_id = _think_ids("starts_in_reasoning", model)[1] if submit.starts_in_reasoning else None
    return Constraint(kind, getattr(submit, kind), close_id)


def _think_ids(name: str, model: ModelFacts) -> tuple[int, int]:
    if model.think_ids is None:
        raise InvalidSubmitError(name, "the model's tokenizer has no <think> and </think>: leave it out")
    return model.think_ids


def _check_ids(name: str, token_ids: Sequence[int], model: ModelFacts) -> None:
    largest = max(token_ids, default=0)
    if largest >= model.vocab_size:
        raise InvalidSubmitError(name, f"token {largest} does not exist: ids must be below {model.vocab_size}")


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
    return InvalidSubmitError(name, f"this worker does not serve it: {mend}", ErrorCode.UNIMPLEMENTED)
