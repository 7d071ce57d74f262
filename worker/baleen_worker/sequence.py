"""One request on its way through the scheduler, the queue in which it waits, and the deadlines it is held to.

All of it is owned by the scheduler alone.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

from baleen_worker.step import Admission

if TYPE_CHECKING:
    from baleen_worker.request import Request, RequestId


class State(enum.Enum):
    """Where a sequence is. A finished one keeps its pages and slot until no step in flight refers to it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """The tokens of a request and what they occupy.

    `token_ids` is the prompt followed by the output. Keys of the first `num_planned` of them are in the pages, or
    will be once the steps in flight are done. The difference is what is still to be computed: a prompt, or the one
    token sampled last. That one rule also covers rows that yield several tokens and a return after preemption.
    """

    __slots__ = (
        "host_dependent",
        "id",
        "max_len",
        "num_in_flight",
        "num_planned",
        "num_prompt",
        "pages",
        "request",
        "reserved_pages",
        "slot",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, request: Request, *, reserved_pages: int) -> None:
        sampling = request.sampling
        self.request = request
        self.id = request.id
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.max_len = self.num_prompt + sampling.max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.reserved_pages = reserved_pages
        # Its next token depends on what the host makes of its last one, so no row of it is planned before that one is
        # committed.
        self.host_dependent = False
        self.state = State.WAITING
        self.num_planned = 0
        self.num_in_flight = 0
        self.pages: list[int] = []
        self.slot = -1

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt


def admission_of(sequence: Sequence) -> Admission:
    """What the runner is told when a sequence has got its slot, for the first time or after a preemption."""
    sampling = sequence.request.sampling
    if not sampling.needs_history:
        return Admission(sequence.slot, sampling)
    return Admission(sequence.slot, sampling, tuple(sequence.token_ids), sequence.num_prompt)


class WaitingQueue:
    """Higher priority first, first come first served within one priority; any member can leave in O(1)."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[RequestId, Sequence]] = {}
        self._num_waiting = 0
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the waiting prompts hold."""
        return self._num_prompt_tokens

    def push(self, sequence: Sequence) -> None:
        """Joins the end of its priority."""
        self._by_priority.setdefault(sequence.request.priority, OrderedDict())[sequence.id] = sequence
        self._num_waiting += 1
        self._num_prompt_tokens += sequence.num_prompt

    def first(self) -> Sequence | None:
        """Who is next, without removing it."""
        if not self._by_priority:
            return None
        return next(iter(self._by_priority[max(self._by_priority)].values()))

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        priority = sequence.request.priority
        members = self._by_priority[priority]
        del members[sequence.id]
        if not members:
            del self._by_priority[priority]
        self._num_waiting -= 1
        self._num_prompt_tokens -= sequence.num_prompt


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
