"""What a client asked for, as the engine sees it. Owns no state: a request never changes after it is submitted.

These structs are also what the head sends to the rank (msgspec, array-like), so their field order is a wire format
between two processes of one installation, never between versions.
"""

from __future__ import annotations

import enum

import msgspec

# (Connect stream of the head, key on that stream): unique for the life of the worker, because the head never reuses
# a stream number and a gateway never reuses a key. Offline use is stream 0.
RequestId = tuple[int, int]


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are those of `baleen.worker.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    HANDED_OVER = 4


class ErrorCode(enum.IntEnum):
    """Why a request failed; the numbers are those of `baleen.worker.v1.ErrorCode`."""

    INVALID_ARGUMENT = 1
    UNIMPLEMENTED = 2
    INTERNAL = 3
    UNAVAILABLE = 4
    RESOURCE_EXHAUSTED = 5
    DEADLINE_EXCEEDED = 6
    PEER_FAILED = 7


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """At most `max_tokens` reasoning tokens; then `close_id` (`</think>`) is forced.

    Reasoning begins with `open_id` (`<think>`), or with the output when the prompt `starts_open`. A model that opens
    it again goes on with what is left.
    """

    max_tokens: int
    open_id: int
    close_id: int
    starts_open: bool = False


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to choose tokens; every default is the neutral value.

    `logprobs` and `prompt_logprobs`: None for none, else how many alternatives to list beside the token itself.
    `max_tokens` 0 computes the prompt and samples nothing, which scores it.
    `stop_token_ids` already holds the model's end-of-sequence ids unless the request ignores them.
    `seed` is always set: the gateway or the head draws one where the client gave none.
    `repetition_penalty` looks at prompt and output, `frequency_penalty` and `presence_penalty` at the output alone.
    `logit_bias` are (token id, what is added to its logit), each id once.
    `logit_processors` are names of plugins that the rank has loaded, in the order in which they apply.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    thinking: ThinkingBudget | None = None
    logit_processors: tuple[str, ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens have occurred."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on more of the tokens before it than the logits do."""
        return self.penalizes or self.thinking is not None or bool(self.logit_processors)


class Role(enum.IntEnum):
    """What a worker, or a leg of a request, does; the numbers are those of `baleen.worker.v1.Role`."""

    UNIFIED = 1
    PREFILL = 2
    DECODE = 3


class Leg(msgspec.Struct, frozen=True, array_like=True):
    """One half of a request that two workers serve. A decode leg reads pages at `peer_address` (host:port), from rank
    `peer_rank` of the worker whose boot epoch is `peer_epoch`.
    """

    role: Role
    peer_address: str = ""
    peer_epoch: int = 0
    peer_rank: int = 0


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match. `kind`: the field of the contract that says how `source` is written.

    `after_id`: the constraint begins after this token (`</think>`), because the prompt ends inside reasoning; None: at
    once.
    """

    kind: str
    source: str
    after_id: int | None = None


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to be continued once. `request_id` and `attempt` identify it across processes, for logs and leases.

    Requests share cached pages only under equal `cache_salt`. Samples of one prompt have the same `group_id`, which is
    empty for a request that is alone. `resumed_token_ids` are output tokens that an earlier attempt has told: the
    request goes on after them, and tells none of them again.
    """

    id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    request_id: bytes = b""
    attempt: int = 0
    priority: int = 0
    deadline_ms: int | None = None
    constraint: Constraint | None = None
    cache_salt: str = ""
    group_id: bytes = b""
    resumed_token_ids: list[int] = []
    leg: Leg | None = None

    @property
    def leg_key(self) -> tuple[bytes, int]:
        """What both legs of a request are called."""
        return self.request_id, self.attempt
