"""Decides what each engine step computes. Owns every request's token state; does no I/O, reads no clock.

The queues are in one place, the roster; `planning.py` and `committing.py` work on it, one for each half of a step.
`plan` turns waiting and running requests into a StepPlan, `commit` takes the step's output back. Several plans may be
in flight at once (they are committed in order): a decode whose input is still being sampled is planned all the same,
and the runner takes the token from the device. So whatever a step refers to, pages and slot, is given back only once
that step is committed, however early its request ended.

Admission counts the pages a request needs now and expects some growth. When pages run out all the same, the request
with the shortest output makes way (the lowest priority first) and is computed again later, from whatever of it is
still cached. It keeps its output, so the strongest of the running requests never loses its place and somebody always
gets to the end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baleen_worker.committing import Committer
from baleen_worker.growth import GrowthEstimate
from baleen_worker.handover import Handover
from baleen_worker.output import Load, Output, failed
from baleen_worker.planning import Planner
from baleen_worker.request import ErrorCode, FinishReason, Request, RequestId
from baleen_worker.residency import Residency
from baleen_worker.roster import Roster
from baleen_worker.sequence import Deadlines, State
from baleen_worker.step import StepOutput, StepPlan
from baleen_worker.waiting import Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from baleen_worker.cache.events import CacheEvent
    from baleen_worker.cache.pages import PagePool
    from baleen_worker.cache.prefix import PrefixCache
    from baleen_worker.draft import Draft
    from baleen_worker.grammar.guide import Guide
    from baleen_worker.news import News
    from baleen_worker.transfer.orders import LegNews, Order


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_step_tokens`: tokens one step may compute, decodes included; at least one page of them.

    `preemption_threshold`: a waiting request takes a running one's place when its priority is higher by more than this.
    `conservativeness` scales the growth that admission expects of running requests.
    """

    max_running_requests: int
    max_step_tokens: int
    max_queued_requests: int
    page_size: int = 64
    policy: Policy = Policy.FCFS
    conservativeness: float = 1.0
    preemption_threshold: int = 10

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.page_size:
            raise ValueError(f"a step of {self.max_step_tokens} tokens cannot hold a page of {self.page_size}")
        if self.max_running_requests < 1 or self.max_queued_requests < 1:
            raise ValueError("at least one request must be able to run and to wait")


class Scheduler:
    """Waiting and running requests of one rank."""

    def __init__(self, limits: SchedulerLimits, pages: PagePool, cache: PrefixCache | None = None) -> None:
        """`cache` is over the same pool; without one, no request reuses another's pages."""
        self._limits = limits
        self._pages = pages
        self._cache = cache
        self._host = None if cache is None else cache.host
        self._residency = Residency(limits.max_running_requests, limits.page_size, pages, cache)
        self._growth = GrowthEstimate(limits.conservativeness)
        self._roster = Roster(self._residency, limits.policy, limits.page_size, shares_prompts=cache is not None)
        self._planner = Planner(
            self._roster,
            self._growth,
            max_step_tokens=limits.max_step_tokens,
            page_size=limits.page_size,
            preemption_threshold=limits.preemption_threshold,
        )
        self._committer = Committer(self._roster, limits.page_size)
        self._handover = Handover(self._roster, self._committer)
        self._deadlines = Deadlines()
        self._flights: deque[Draft] = deque()
        self._num_steps = 0

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request, now_ms: float, guide: Guide | None = None) -> Output | None:
        """Queues a request that was validated against limits and context. Returns an output when it is refused.

        `guide` follows its answer when the request has a constraint.
        """
        roster = self._roster
        if roster.get(request.id) is not None:
            return failed(request.id, ErrorCode.INVALID_ARGUMENT, "the key names a request that still runs", "key")
        if roster.num_queued >= self._limits.max_queued_requests:
            message = f"{roster.num_queued} requests are waiting already: retry later or on another worker"
            return failed(request.id, ErrorCode.RESOURCE_EXHAUSTED, message)
        if request.leg is not None and roster.legs.knows(request.leg_key):
            message = "another request of this id and attempt is still here: count the attempt up"
            return failed(request.id, ErrorCode.INVALID_ARGUMENT, message, "attempt")
        num_pages = self._residency.pages_for(len(request.prompt_token_ids) + request.sampling.max_tokens)
        if num_pages > self._pages.capacity:
            message = f"{num_pages} pages are needed and the worker has {self._pages.capacity}: lower max_tokens"
            return failed(request.id, ErrorCode.INVALID_ARGUMENT, message, "max_tokens")
        sequence = roster.enrol(request, guide)
        if request.deadline_ms is not None:
            self._deadlines.watch(now_ms + request.deadline_ms, sequence, num_live=len(roster))
        return None

    def abort(self, request_id: RequestId) -> Output | None:
        """Ends a request wherever it is; None when it is unknown or has ended."""
        sequence = self._roster.get(request_id)
        if sequence is None:
            return None
        self._roster.finish(sequence)
        return Output(request_id, finish_reason=FinishReason.ABORT)

    def abort_stream(self, stream: int) -> list[Output]:
        """Ends every request of one Connect stream."""
        return [output for output in map(self.abort, self._roster.of_stream(stream)) if output is not None]

    def expire(self, now_ms: float) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        outputs: list[Output] = []
        for sequence in self._deadlines.passed(now_ms):
            self._roster.finish(sequence)
            message = f"not finished within {sequence.request.deadline_ms} ms of its arrival"
            outputs.append(failed(sequence.id, ErrorCode.DEADLINE_EXCEEDED, message, "deadline_ms"))
        return outputs

    def end_exhausted(self) -> list[Output]:
        """Ends the constrained answers that no token may follow: their grammar leads nowhere."""
        outputs: list[Output] = []
        for sequence in self._roster.guided:
            guide = sequence.guide
            # A mask that is still being made is waited for only where it would be needed at once, after a preemption.
            if guide is not None and (guide.ready or sequence.state is not State.RUNNING) and guide.exhausted:
                self._roster.finish(sequence)
                outputs.append(Output(sequence.id, finish_reason=FinishReason.LENGTH))
        return outputs

    def flush(self) -> int | None:
        """Drops all cached pages and returns their number; None while requests are live or steps in flight."""
        if not self.idle:
            return None
        return 0 if self._cache is None else self._cache.clear()

    # --- legs of requests that two workers serve ------------------------------------------------------------------

    def take_orders(self) -> list[Order]:
        """What the transfer of legs is to do, since the last call; to be given to it after the plan's copies."""
        return self._roster.legs.take_orders()

    def hear(self, news: Iterable[LegNews]) -> list[Output]:
        """Takes news of the transfer in, and returns what requests are to be told."""
        return self._handover.hear(news)

    # --- one step -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before an earlier step is committed."""
        draft = self._planner.plan()
        if not draft.rows:
            return None
        self._num_steps += 1
        self._flights.append(draft)
        copies = None if self._host is None else self._host.take()
        return StepPlan(self._num_steps, draft.admissions, draft.rows, copies)

    def commit(self, plan: StepPlan, output: StepOutput) -> News:
        """Takes the output of the oldest step in flight and returns what its requests are to be told."""
        draft = self._flights.popleft()
        assert draft.rows is plan.rows, f"step {plan.step} is committed but is not the oldest in flight"
        assert output.step == plan.step, f"step {plan.step} is committed with the output of step {output.step}"
        assert len(output.token_ids) == len(plan.rows), "the output has other rows than the plan"
        news = self._committer.commit(draft, output)
        self._growth.stepped()
        return news

    def rows_alone(self, plan: StepPlan) -> dict[int, StepPlan]:
        """Each row of the oldest plan in flight as a step of its own, by row index, to be computed (again).

        Everything before that plan is committed, so tokens that were to come from the device are known. Rows of
        requests that are over are left out.
        """
        draft = self._flights[0]
        assert draft.rows is plan.rows, f"step {plan.step} is taken apart but is not the oldest in flight"
        return draft.rows_alone(plan)

    # --- what others may ask --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is live, no step is in flight, and no transfer touches a page."""
        return not len(self._roster) and not self._flights and not self._roster.legs.any_stopping

    @property
    def host_decides(self) -> bool:
        """Whether the next token of a running request depends on what the host makes of its last one."""
        return self._roster.num_host_dependent > 0

    @property
    def waits_for_masks(self) -> bool:
        """Whether a running request cannot go on until its mask is ready."""
        return any(s.state is State.RUNNING and s.awaits_host for s in self._roster.guided)

    @property
    def waits_for_peers(self) -> bool:
        """Whether some request can go on only when the transfer has news."""
        return self._roster.legs.any_waiting

    @property
    def load(self) -> Load:
        """Counters for routing and display."""
        roster = self._roster
        num_cached = 0 if self._cache is None else self._cache.num_idle
        # Legs that have pages count as running: what they will take is as good as taken.
        num_running = roster.num_running + roster.legs.num_waiting - len(roster.legs.awaited)
        return Load(
            running_requests=num_running,
            waiting_requests=len(roster) - num_running,
            used_pages=self._pages.num_used + self._pages.num_quarantined - num_cached,
            total_pages=self._pages.capacity,
            waiting_prompt_tokens=roster.waiting.num_tokens + self._num_prefilling_tokens,
            steps=self._num_steps,
            generated_tokens=self._committer.num_generated_tokens,
            prompt_tokens=self._committer.num_prompt_tokens,
            cached_pages=num_cached,
            cached_tokens=self._planner.num_cached_tokens,
            preemptions=self._planner.num_preemptions,
            host_pages=0 if self._host is None else len(self._host),
            host_capacity_pages=0 if self._host is None else self._host.capacity,
            host_stored_pages=0 if self._host is None else self._host.num_stored_pages,
            host_fetched_pages=0 if self._host is None else self._host.num_fetched_pages,
        )

    @property
    def _num_prefilling_tokens(self) -> int:
        if not self._roster.prefilling:
            return 0
        columns = self._residency.columns
        prefilling = columns.runs & ~columns.decodes
        return int((columns.num_tokens - columns.num_planned)[prefilling].sum())

    def take_cache_events(self) -> list[CacheEvent]:
        """What the prefix cache has stored and removed since the last call."""
        return [] if self._cache is None else self._cache.take_events()

    def cached_page_hashes(self) -> list[int]:
        """The names of all cached pages, each after the page before it."""
        return [] if self._cache is None else [node.hash for node in self._cache.nodes()]

    def check(self, quarantined: Collection[int] = ()) -> None:
        """Asserts that all pages, slots and requests are accounted for. Costs O(pages): for tests.

        `quarantined` are pages that somebody outside has put there.
        """
        self._roster.check(quarantined)
        if self.idle:
            self.check_idle()

    def check_idle(self) -> None:
        """Asserts that nobody holds a page when nothing is live. Costs O(1)."""
        num_cached = 0 if self._cache is None else self._cache.num_pages
        assert self._pages.num_used == num_cached, "nothing is live but pages are held"
        assert self._cache is None or self._cache.num_idle == num_cached, "nothing is live but cached pages are held"
