"""One request on its way through the scheduler, and the deadlines it is held to.

All of it is owned by the scheduler and its collaborators alone.
"""

from __future__ import annotations

import enum
import heapq
from typing import TYPE_CHECKING

from baleen_worker.step import Admission

if TYPE_CHECKING:
    from baleen_worker.cache.prefix import PrefixNode
    from baleen_worker.grammar.guide import Guide
    from baleen_worker.request import Request


class State(enum.Enum):
    """Where a sequence is. One that leaves or is finished keeps pages and slot until no step in flight refers to it.

    LEAVING: preempted, and a step in flight still refers to it; it waits again as soon as that step has landed.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """The tokens of a request and what they occupy.

    `token_ids` is the prompt followed by the output, as far as it is known; `num_pending` more tokens are being sampled
    by steps in flight. Keys of the first `num_planned` tokens are in the pages, or will be once those steps are done.
    What lies between is still to be computed: a prompt, or the one token sampled last. That one rule also covers rows
    that yield several tokens and a return after preemption.

    `pages` is its page table, of which the runner knows the first `num_bound`. The first `num_attached` are the
    prefix cache's, reached from the held `node`, except for those in `duplicates`, whose tokens the cache has in
    another page; these and all later ones are its own.
    """

    __slots__ = (
        "arrival",
        "duplicates",
        "guide",
        "host_dependent",
        "id",
        "keys",
        "max_len",
        "node",
        "num_attached",
        "num_bound",
        "num_cached",
        "num_in_flight",
        "num_overtaken",
        "num_pending",
        "num_planned",
        "num_prompt",
        "num_scored",
        "pages",
        "request",
        "salt",
        "slot",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, request: Request, *, arrival: int, guide: Guide | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.id = request.id
        self.salt = request.cache_salt
        self.arrival = arrival
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.max_len = self.num_prompt + sampling.max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.guide = guide  # of a constrained answer: follows its committed tokens, whatever happens to its pages
        # Its next token depends on what the host makes of its last one, so no row of it is planned before that one is
        # committed.
        self.host_dependent = guide is not None or bool(sampling.logit_processors)
        self.state = State.WAITING
        self.num_overtaken = 0  # how often somebody behind it was admitted first
        self.num_cached: int | None = None  # prompt tokens found in the cache when it was first admitted
        self.num_scored = 0  # tokens whose log-probabilities have been asked for, counted from the prompt's start
        self.num_in_flight = 0
        self.num_pending = 0
        self.keys = b""  # token_ids as the prefix cache compares them, while that saves packing them again
        self.vacate()

    def vacate(self) -> None:
        """It holds nothing, and all its tokens are to be computed."""
        self.slot = -1
        self.num_planned = 0
        self.num_bound = 0
        self.num_attached = 0
        self.pages: list[int] = []
        self.duplicates: list[int] = []
        self.node: PrefixNode | None = None

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

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
        return (self.request.priority, len(self.token_ids) - self.num_prompt, -self.arrival)


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
