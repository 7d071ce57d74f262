"""One request on its way through the scheduler, and the deadlines it is held to.

All of it is owned by the scheduler and its collaborators alone.
"""

from __future__ import annotations

import enum
import heapq
from array import array
from typing import TYPE_CHECKING

from baleen_worker.request import Role
from baleen_worker.step import Admission

if TYPE_CHECKING:
    from baleen_worker.cache.prefix import PrefixNode
    from baleen_worker.grammar.guide import Guide
    from baleen_worker.packed import Column
    from baleen_worker.request import Request
    from baleen_worker.slots import SlotColumns


class State(enum.Enum):
    """Where a sequence is. One that leaves or is finished keeps pages and slot until no step in flight refers to it.

    LEAVING: preempted, and a step in flight still refers to it; it waits again as soon as that step has landed.
    AWAITING: a decode leg, in no queue until the other worker has begun with its prompt.
    RECEIVING: a decode leg with slot and pages, in no step while its pages come; the transfer counts as one in flight.
    HELD: a prefill leg whose prompt is computed; it keeps slot and pages for the other worker, and is in no step.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    AWAITING = enum.auto()
    RECEIVING = enum.auto()
    HELD = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """The tokens of a request and what they occupy.

    `token_ids` is the prompt followed by the output, as far as it is known; `num_pending` more tokens are being sampled
    by steps in flight. Keys of the first `num_planned` tokens are in the pages, or will be once those steps are done.
    What lies between is still to be computed: a prompt, or the one token sampled last. That one rule also covers rows
    that yield several tokens and a return after preemption.

    While it has a slot, what steps change of it stands in the columns (`slots.py`): `num_tokens`, the length of
    `token_ids`; `num_planned`, `num_pending`; `num_in_flight`, steps that refer to it; `num_bound`. Without a slot, all
    but the first are 0.

    `pages` is its page table, of which the runner knows the first `num_bound`. The first `num_attached` are the
    prefix cache's, reached from the held `node`, except for those in `duplicates`, whose tokens the cache has in
    another page; these and all later ones are its own.
    """

    __slots__ = (
        "_columns",
        "_token_ids",
        "arrival",
        "duplicates",
        "expects_pages",
        "guide",
        "host_dependent",
        "id",
        "is_plain",
        "keys",
        "max_len",
        "node",
        "num_attached",
        "num_cached",
        "num_offered",
        "num_overtaken",
        "num_prompt",
        "num_scored",
        "pages",
        "request",
        "role",
        "salt",
        "slot",
        "state",
        "stop_ids",
    )

    def __init__(self, request: Request, *, arrival: int, guide: Guide | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.id = request.id
        self.salt = request.cache_salt
        self.arrival = arrival
        self.num_prompt = len(request.prompt_token_ids)
        self._token_ids = array("I", request.prompt_token_ids)
        self._token_ids.extend(request.resumed_token_ids)
        self._columns: SlotColumns | None = None
        self.role = Role.UNIFIED if request.leg is None else request.leg.role
        self.expects_pages = self.role is Role.DECODE  # until they have come; what is preempted later is computed here
        self.num_offered = 0  # of a prefill leg: pages that the other worker may read
        # A prefill leg samples one token, and others go on from there.
        num_output = len(request.resumed_token_ids) + 1 if self.role is Role.PREFILL else sampling.max_tokens
        self.max_len = self.num_prompt + num_output
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.guide = guide  # of a constrained answer: follows its committed tokens, whatever happens to its pages
        # Its next token depends on what the host makes of its last one, so no row of it is planned before that one is
        # committed.
        self.host_dependent = guide is not None or bool(sampling.logit_processors)
        self.is_plain = not self.host_dependent and sampling.logprobs is None
        self.state = State.WAITING
        self.num_overtaken = 0  # how often somebody behind it was admitted first
        self.num_cached: int | None = None  # prompt tokens found in the cache when it was first admitted
        # Tokens whose log-probabilities have been asked for, counted from the prompt's start. An attempt that has told
        # output tokens has told those of the whole prompt, and those of a decode leg come from the other worker.
        self.num_scored = self.num_prompt if request.resumed_token_ids or self.expects_pages else 0
        self.keys = b""  # token_ids as the prefix cache compares them, while that saves packing them again
        self.slot = -1
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        self.num_attached = 0
        self.pages: list[int] = []
        self.duplicates: list[int] = []
        self.node: PrefixNode | None = None

    def sit(self, slot: int, columns: SlotColumns) -> None:
        """It runs in that slot; all its tokens are to be computed."""
        columns.seat(slot, self)
        self.slot, self._columns = slot, columns
        self.state = State.RUNNING

    def vacate(self) -> None:
        """It has no slot any more and holds nothing."""
        assert self._columns is not None, "a sequence leaves a slot that it does not have"
        self.settle()
        self._columns.clear(self.slot)
        self.slot, self._columns = -1, None
        self._hold_nothing()

    # --- tokens ---------------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> Column:
        """All tokens that are known, as uint32; not to be changed."""
        self.settle()
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Their number."""
        return len(self._token_ids) if self._columns is None else int(self._columns.num_tokens[self.slot])

    def extend(self, token_bytes: bytes) -> None:
        """Tokens that the columns have counted already, as uint32."""
        self._token_ids.frombytes(token_bytes)

    def settle(self) -> None:
        """Takes its latest tokens over from the columns."""
        if self._columns is not None and self._columns.num_recent[self.slot]:
            self.extend(self._columns.take_recent(self.slot))

    def append(self, token_id: int) -> None:
        """One more token is known."""
        columns = self._columns
        assert columns is not None, "a token is sampled for a sequence without a slot"
        self.settle()
        self._token_ids.append(token_id)
        columns.num_tokens[self.slot] += 1
        columns.last_token[self.slot] = token_id

    # --- what its slot's columns say --------------------------------------------------------------------------------

    @property
    def num_planned(self) -> int:
        """See the class."""
        return 0 if self._columns is None else int(self._columns.num_planned[self.slot])

    @property
    def num_pending(self) -> int:
        """See the class."""
        return 0 if self._columns is None else int(self._columns.num_pending[self.slot])

    @property
    def num_in_flight(self) -> int:
        """See the class."""
        return 0 if self._columns is None else int(self._columns.num_in_flight[self.slot])

    @property
    def num_bound(self) -> int:
        """See the class."""
        return 0 if self._columns is None else int(self._columns.num_bound[self.slot])

    @property
    def num_output(self) -> int:
        """Tokens generated so far, by earlier attempts too."""
        return self.num_tokens - self.num_prompt

    @property
    def awaits_host(self) -> bool:
        """Whether its next row cannot be planned yet, because the host lacks its last token or is at its mask."""
        if not self.host_dependent:
            return False
        return self.num_pending > 0 or (self.guide is not None and not self.guide.ready)

    @property
    def next_mask(self) -> bytes:
        """What `PlannedRow.mask` wants for the token after the last known one."""
        return b"" if self.guide is None else self.guide.mask()

    @property
    def strength(self) -> tuple[int, int, int]:
        """Who keeps its pages when they run out: the larger. No two sequences are equal.

        Output is kept through a preemption, so this never falls: the strongest runs to its end, then the next.
        """
        return (self.request.priority, self.num_output, -self.arrival)


def admission_of(sequence: Sequence) -> Admission:
    """What the runner is told when a sequence has got its slot, for the first time or after a preemption."""
    sampling = sequence.request.sampling
    if not sampling.needs_history:
        return Admission(sequence.slot, sampling)
    return Admission(sequence.slot, sampling, tuple(sequence.token_ids), sequence.num_prompt)


class Deadlines:
    """Sequences that must end by a given time, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_watched = 0

    def watch(self, deadline_ms: float, sequence: Sequence, *, num_live: int) -> None:
        """Remembers a deadline. `num_live` requests exist: with many more entries, the ended ones are forgotten."""
        self._num_watched += 1  # breaks ties, since sequences have no order
        heapq.heappush(self._heap, (deadline_ms, self._num_watched, sequence))
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapq.heapify(self._heap)

    def passed(self, now_ms: float) -> list[Sequence]:
        """Takes out the sequences whose deadline has come and that have not ended."""
        late: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now_ms:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.state is not State.FINISHED:
                late.append(sequence)
        return late
