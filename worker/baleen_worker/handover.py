"""What news of a transfer means for the requests it is about. Owned by the scheduler; the queues are the roster's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baleen_worker.output import Output, failed
from baleen_worker.request import ErrorCode, FinishReason
from baleen_worker.sequence import State
from baleen_worker.transfer.actions import Arrived, Begun, Failed, HandedOver, LeaseEnded, Stopped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baleen_worker.committing import Committer
    from baleen_worker.roster import Roster
    from baleen_worker.sequence import Sequence
    from baleen_worker.transfer.messages import Key
    from baleen_worker.transfer.orders import LegNews


class Handover:
    """Takes news in the order in which the transfer has told it."""

    def __init__(self, roster: Roster, committer: Committer) -> None:
        self._roster = roster
        self._legs = roster.legs
        self._committer = committer

    def hear(self, news: Iterable[LegNews]) -> list[Output]:
        """What the requests are to be told."""
        outputs = [self._hear(entry) for entry in news]
        return [output for output in outputs if output is not None]

    def _hear(self, news: LegNews) -> Output | None:
        key = news.key
        match news.report:
            case Begun():
                sequence = self._legs.awaited.get(key)
                if sequence is not None:
                    self._roster.peer_has_begun(sequence)
            case Arrived() as arrived:
                return self._arrive(key, arrived)
            case Failed(reason):
                return self._fail(key, f"the worker that computes the prompt failed: {reason}")
            case Stopped():
                self._let_go(self._legs.stopped(key))
            case HandedOver():
                sequence = self._legs.settle(key)
                if sequence is not None:
                    self._roster.finish(sequence)
                    return Output(sequence.id, finish_reason=FinishReason.HANDED_OVER)
            case LeaseEnded():
                return self._fail(key, "nobody has fetched the pages of this prompt in time")
        return None

    def _arrive(self, key: Key, arrived: Arrived) -> Output | None:
        sequence = self._legs.settle(key)
        if sequence is None:  # aborted meanwhile, and the transfer was faster than the word of it
            self._let_go(self._legs.stopped(key))
            return None
        final = arrived.final
        sequence.num_cached = final.cached_tokens
        self._roster.columns.num_cached[sequence.slot] = final.cached_tokens
        self._roster.pages_have_come(sequence)
        told = self._committer.first_token(sequence, final.token_id)
        if told.error is None:
            told.logprobs = final.logprobs if sequence.request.sampling.logprobs is not None else None
            told.prompt_logprobs = arrived.prompt_logprobs
        return told

    def _fail(self, key: Key, message: str) -> Output | None:
        sequence = self._legs.settle(key)
        if sequence is None:
            self._let_go(self._legs.stopped(key))
            return None
        if sequence.state is State.RECEIVING:
            self._roster.columns.num_in_flight[sequence.slot] = 0
        self._roster.finish(sequence)
        return failed(sequence.id, ErrorCode.PEER_FAILED, message)

    def _let_go(self, sequence: Sequence | None) -> None:
        """The pages of a request that is over are touched by nobody any more."""
        if sequence is not None:
            self._roster.columns.num_in_flight[sequence.slot] = 0
            self._roster.landed(sequence)
