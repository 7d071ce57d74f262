"""Requests that two workers serve, as one of them sees its half: who waits for the other worker, and what to tell it.

Owned by the roster. Orders gather here until the engine hands them to the transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS
from baleen_worker.request import Role
from baleen_worker.sequence import Sequence
from baleen_worker.transfer.messages import Final, Key
from baleen_worker.transfer.orders import Cancel, Expect, Finish, Offer, Open, Order, Peer, Receive, Score, Withdraw

if TYPE_CHECKING:
    from collections.abc import Callable

    from baleen_worker.step import TokenLogprobs


class Legs:
    """`awaited` are decode legs whose peer has not begun; they are in no queue."""

    def __init__(self, generations_of: Callable[[list[int]], list[int]]) -> None:
        self.awaited: dict[Key, Sequence] = {}
        self._generations_of = generations_of
        self._live: dict[Key, Sequence] = {}
        self._away: set[Key] = set()  # those that are received or held
        self._stopping: dict[Key, Sequence] = {}
        self._orders: list[Order] = []

    @property
    def num_waiting(self) -> int:
        """Legs that only the other worker, or the transfer, can move."""
        return len(self.awaited) + len(self._away)

    @property
    def any_waiting(self) -> bool:
        """Whether there are such legs, or pages that come back when the transfer has let go of them."""
        return bool(self._stopping or self._away or self.awaited)

    @property
    def any_stopping(self) -> bool:
        """Whether the transfer may still touch pages of requests that are over."""
        return bool(self._stopping)

    def find(self, key: Key) -> Sequence | None:
        """The live leg of that name."""
        return self._live.get(key)

    def knows(self, key: Key) -> bool:
        """Whether a leg of that name is here, or was until a moment ago."""
        return key in self._live or key in self._stopping

    def take_orders(self) -> list[Order]:
        """What the transfer is to do, since the last call."""
        orders, self._orders = self._orders, []
        return orders

    # --- they come and go -------------------------------------------------------------------------------------------

    def open(self, sequence: Sequence) -> None:
        """A leg is here."""
        request = sequence.request
        leg, key = request.leg, request.leg_key
        assert leg is not None, "a request of one worker has no legs"
        self._live[key] = sequence
        if leg.role is Role.PREFILL:
            self._orders.append(Open(key))
            return
        self.awaited[key] = sequence
        scores = request.sampling.prompt_logprobs is not None and not request.resumed_token_ids
        num_scored = sequence.num_prompt - 1 if scores else 0
        num_pages = -(-sequence.num_tokens // PAGE_SIZE_TOKENS)
        peer = Peer(leg.peer_address, leg.peer_epoch, leg.peer_rank)
        self._orders.append(Expect(key, peer, num_pages, num_scored))

    def end(self, sequence: Sequence) -> None:
        """The leg is over on this side, unless the transfer itself has said so (`settle`)."""
        key = sequence.request.leg_key
        if self._live.get(key) is not sequence:
            return
        self.settle(key)
        if sequence.role is Role.PREFILL or sequence.expects_pages:
            self._orders.append(Cancel(key))
        if sequence.expects_pages:
            self._stopping[key] = sequence

    def settle(self, key: Key) -> Sequence | None:
        """The transfer is done with the leg; whose it was, None when it is over already."""
        self.awaited.pop(key, None)
        self._away.discard(key)
        return self._live.pop(key, None)

    def stopped(self, key: Key) -> Sequence | None:
        """The transfer has let go of a leg that was over; its sequence, if that still holds pages."""
        sequence = self._stopping.pop(key, None)
        return sequence if sequence is not None and sequence.num_in_flight else None

    # --- what the transfer is told ----------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, first: int, num_pages: int) -> None:
        """The pages of a decode leg from place `first` on are to be filled."""
        key = sequence.request.leg_key
        self._away.add(key)
        self._orders.append(Receive(key, first, sequence.pages[first:num_pages]))

    def offer(self, sequence: Sequence, num_computed: int, *, whole: bool) -> None:
        """Pages of a prefill leg that are full, or will not get fuller, may be read."""
        end = -(-num_computed // PAGE_SIZE_TOKENS) if whole else num_computed // PAGE_SIZE_TOKENS
        first = sequence.num_offered
        if end > first:
            pages = sequence.pages[first:end]
            self._orders.append(Offer(sequence.request.leg_key, first, pages, self._generations_of(pages)))
            sequence.num_offered = end

    def score(self, sequence: Sequence, start: int, logprobs: TokenLogprobs) -> None:
        """Log-probabilities of prompt tokens, by the logits at `start` and after."""
        self._orders.append(Score(sequence.request.leg_key, start, logprobs))

    def finish(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A prefill leg has its token."""
        key = sequence.request.leg_key
        self._away.add(key)
        final = Final(token_id, sequence.num_cached or 0, sequence.num_offered, logprobs)
        self._orders.append(Finish(key, final))

    def withdraw(self, sequence: Sequence) -> None:
        """A prefill leg loses its pages and will be computed again."""
        if sequence.role is Role.PREFILL and sequence.num_offered:
            sequence.num_offered = 0
            self._orders.append(Withdraw(sequence.request.leg_key))
