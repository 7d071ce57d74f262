"""What a request gives back, piece by piece, as the engine publishes it. Plain data, owned by whoever holds it."""

from __future__ import annotations

import msgspec

from baleen_worker.request import ErrorCode, FinishReason, RequestId
from baleen_worker.step import TokenLogprobs


class RequestError(msgspec.Struct, frozen=True, array_like=True):
    """Why a request failed: `field` is the field of the contract at fault, "" when it is none of them."""

    code: ErrorCode
    message: str
    field: str = ""


class Output(msgspec.Struct, array_like=True, gc=False):
    """News of one request. Exactly one output of a request is final: it has a `finish_reason` or an `error`.

    `logprobs` describes `token_ids`; `prompt_logprobs` describes the next prompt tokens, starting at prompt token 1.
    """

    id: RequestId
    token_ids: list[int] = msgspec.field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    @property
    def final(self) -> bool:
        """Whether nothing follows for this request."""
        return self.finish_reason is not None or self.error is not None


def failed(request_id: RequestId, code: ErrorCode, message: str, field: str = "") -> Output:
    """The end of a request that cannot be served."""
    return Output(request_id, error=RequestError(code, message, field))


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy one rank is: the fields of `baleen.worker.v1.LoadReport`, four of the host tier, and five of transfers.

    `dropped_peers`: connections of strangers, and of peers that broke the protocol.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    used_pages: int = 0
    total_pages: int = 0
    waiting_prompt_tokens: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_pages: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    host_pages: int = 0
    host_capacity_pages: int = 0
    host_stored_pages: int = 0
    host_fetched_pages: int = 0
    sent_pages: int = 0
    received_pages: int = 0
    stale_reads: int = 0
    damaged_reads: int = 0
    failed_transfers: int = 0
    dropped_peers: int = 0
