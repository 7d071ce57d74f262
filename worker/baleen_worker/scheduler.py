"""Decides what each engine step computes. Owns every request's token state; does no I/O, reads no clock.

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

from baleen_worker.admission import Admission, Candidate
from baleen_worker.draft import Draft
from baleen_worker.grammar.guide import GuideError
from baleen_worker.growth import GrowthEstimate
from baleen_worker.output import Load, Output, RequestError
from baleen_worker.request import ErrorCode, FinishReason, Request, RequestId
from baleen_worker.residency import Residency
from baleen_worker.sequence import Deadlines, Sequence, State
from baleen_worker.step import PlannedRow, StepOutput, StepPlan
from baleen_worker.waiting import Policy, SampleGroups, WaitingRoom

if TYPE_CHECKING:
    from baleen_worker.cache.events import CacheEvent
    from baleen_worker.cache.pages import PagePool
    from baleen_worker.cache.prefix import PrefixCache
    from baleen_worker.grammar.guide import Guide


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
        self._residency = Residency(limits.max_running_requests, limits.page_size, pages, cache)
        self._growth = GrowthEstimate(limits.conservativeness)
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingRoom(limits.policy, lambda s: len(self._residency.find(s)) * limits.page_size)
        self._admission = Admission(
            self._waiting,
            self._residency,
            self._growth,
            preemption_threshold=limits.preemption_threshold,
            preempt=self._preempt,
        )
        self._groups = SampleGroups()
        self._prefilling: dict[RequestId, Sequence] = {}
        self._decoding: dict[RequestId, Sequence] = {}
        self._deadlines = Deadlines()
        self._flights: deque[Draft] = deque()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._num_host_dependent = 0
        self._guided: dict[RequestId, Sequence] = {}

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request, now_ms: float, guide: Guide | None = None) -> Output | None:
        """Queues a request that was validated against limits and context. Returns an output when it is refused.

        `guide` follows its answer when the request has a constraint.
        """
        if request.id in self._live:
            return _failed(request.id, ErrorCode.INVALID_ARGUMENT, "the key names a request that still runs", "key")
        num_waiting = len(self._waiting) + len(self._groups)
        if num_waiting >= self._limits.max_queued_requests:
            message = f"{num_waiting} requests are waiting already: retry later or on another worker"
            return _failed(request.id, ErrorCode.RESOURCE_EXHAUSTED, message)
        num_pages = self._residency.pages_for(len(request.prompt_token_ids) + request.sampling.max_tokens)
        if num_pages > self._pages.capacity:
            message = f"{num_pages} pages are needed and the worker has {self._pages.capacity}: lower max_tokens"
            return _failed(request.id, ErrorCode.INVALID_ARGUMENT, message, "max_tokens")

        self._num_arrivals += 1
        sequence = Sequence(request, arrival=self._num_arrivals, guide=guide)
        self._live[request.id] = sequence
        if guide is not None:
            self._guided[request.id] = sequence
        self._waiting.open_account(sequence.salt)
        self._enqueue(sequence)
        if request.deadline_ms is not None:
            self._deadlines.watch(now_ms + request.deadline_ms, sequence, num_live=len(self._live))
        return None

    def abort(self, request_id: RequestId) -> Output | None:
        """Ends a request wherever it is; None when it is unknown or has ended."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence)
        return Output(request_id, finish_reason=FinishReason.ABORT)

    def abort_stream(self, stream: int) -> list[Output]:
        """Ends every request of one Connect stream."""
        ids = [request_id for request_id in self._live if request_id[0] == stream]
        return [output for output in map(self.abort, ids) if output is not None]

    def expire(self, now_ms: float) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        outputs: list[Output] = []
        for sequence in self._deadlines.passed(now_ms):
            self._finish(sequence)
            message = f"not finished within {sequence.request.deadline_ms} ms of its arrival"
            outputs.append(_failed(sequence.id, ErrorCode.DEADLINE_EXCEEDED, message, "deadline_ms"))
        return outputs

    def end_exhausted(self) -> list[Output]:
        """Ends the constrained answers that no token may follow: their grammar leads nowhere."""
        outputs: list[Output] = []
        for sequence in [*self._guided.values()]:
            guide = sequence.guide
            # A mask that is still being made is waited for only where it would be needed at once, after a preemption.
            if guide is not None and (guide.ready or sequence.state is not State.RUNNING) and guide.exhausted:
                self._finish(sequence)
                outputs.append(Output(sequence.id, finish_reason=FinishReason.LENGTH))
        return outputs

    def flush(self) -> int | None:
        """Drops all cached pages and returns their number; None while requests are live or steps in flight."""
        if not self.idle:
            return None
        return 0 if self._cache is None else self._cache.clear()

    # --- one step -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before an earlier step is committed."""
        draft = Draft(self._limits.max_step_tokens)
        # The candidate's pages are found again after the decodes, which may take them.
        prefill_waits = bool(self._prefilling) or self._next_admission() is not None
        # A prompt advances by whole pages: leave it one, or a full house of decodes would hold it back for ever.
        self._plan_decodes(draft, draft.budget - self._limits.page_size if prefill_waits else draft.budget)
        if prefill_waits:
            self._plan_prefills(draft)
        if not draft.rows:
            return None
        self._num_steps += 1
        plan = StepPlan(self._num_steps, draft.admissions, draft.rows)
        self._flights.append(draft)
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Output]:
        """Takes the output of the oldest step in flight and returns what its requests are to be told."""
        draft = self._flights.popleft()
        rows = plan.rows
        assert draft.rows is rows, f"step {plan.step} is committed but is not the oldest in flight"
        assert output.step == plan.step, f"step {plan.step} is committed with the output of step {output.step}"
        assert len(output.token_ids) == len(rows), "the output has other rows than the plan"
        outputs: list[Output] = []
        errors, logprobs, prompt_logprobs = output.errors, output.logprobs, output.prompt_logprobs
        for index, sequence in enumerate(draft.sequences):
            row = rows[index]
            sequence.num_in_flight -= 1
            sequence.num_pending -= row.sample
            if sequence.state is State.FINISHED:
                self._residency.landed(sequence)
                continue
            if index in errors:
                self._finish(sequence)
                outputs.append(_failed(sequence.id, ErrorCode.INTERNAL, errors[index]))
                continue
            told = self._commit_row(sequence, row, output.token_ids[index])
            if sequence.state is State.LEAVING and self._residency.landed(sequence):
                self._wait_again(sequence)
            if index in prompt_logprobs:
                told = told or Output(sequence.id)
                told.prompt_logprobs = prompt_logprobs[index]
            if told is not None:
                told.logprobs = logprobs.get(index)
                told.cached_tokens = sequence.num_cached or 0
                outputs.append(told)
        self._growth.stepped()
        return outputs

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
        """Whether no request is live and no step is in flight."""
        return not self._live and not self._flights

    @property
    def host_decides(self) -> bool:
        """Whether the next token of a running request depends on what the host makes of its last one."""
        return self._num_host_dependent > 0

    @property
    def waits_for_masks(self) -> bool:
        """Whether a running request cannot go on until its mask is ready."""
        return any(s.state is State.RUNNING and s.awaits_host for s in self._guided.values())

    @property
    def load(self) -> Load:
        """Counters for routing and display."""
        prefilling = sum(len(s.token_ids) - s.num_planned for s in self._prefilling.values())
        num_cached = 0 if self._cache is None else self._cache.num_idle
        return Load(
            running_requests=len(self._prefilling) + len(self._decoding),
            waiting_requests=len(self._live) - len(self._prefilling) - len(self._decoding),
            used_pages=self._pages.num_used + self._pages.num_quarantined - num_cached,
            total_pages=self._pages.capacity,
            waiting_prompt_tokens=self._waiting.num_tokens + prefilling,
            steps=self._num_steps,
            generated_tokens=self._num_generated_tokens,
            prompt_tokens=self._num_prompt_tokens,
            cached_pages=num_cached,
            cached_tokens=self._num_cached_tokens,
            preemptions=self._num_preemptions,
        )

    def take_cache_events(self) -> list[CacheEvent]:
        """What the prefix cache has stored and removed since the last call."""
        return [] if self._cache is None else self._cache.take_events()

    def check(self) -> None:
        """Asserts that all pages, slots and requests are accounted for. Costs O(pages): for tests."""
        running = [*self._prefilling.values(), *self._decoding.values()]
        self._residency.check(running)
        assert all(sequence.state is State.RUNNING for sequence in running), "a sequence that is over still runs"
        leaving = sum(sequence.state is State.LEAVING for sequence in self._live.values())
        num_waiting = len(self._waiting) + len(self._groups)
        assert len(self._live) == num_waiting + len(running) + leaving, "a live request neither waits nor runs"
        if self.idle:
            self.check_idle()

    def check_idle(self) -> None:
        """Asserts that nobody holds a page when nothing is live. Costs O(1)."""
        num_cached = 0 if self._cache is None else self._cache.num_pages
        assert self._pages.num_used == num_cached, "nothing is live but pages are held"
        assert self._cache is None or self._cache.num_idle == num_cached, "nothing is live but cached pages are held"

    # --- planning -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: Draft, max_rows: int) -> None:
        """One row for each sequence that has a next token to compute and a page for it."""
        decoding = self._decoding
        size = self._limits.page_size
        if self._residency.num_available < len(decoding):
            self._make_room()
        # The last token is never computed, and one that depends on the host must have reached it.
        ready = [
            s for s in decoding.values() if s.num_planned + 1 < s.max_len and not (s.host_dependent and s.awaits_host)
        ]
        if len(ready) > max_rows:
            del ready[max_rows:]
            for sequence in ready:  # they go to the back of the line
                decoding[sequence.id] = decoding.pop(sequence.id)
        grow = self._residency.grow
        draft.add_decodes([s for s in ready if s.num_planned < len(s.pages) * size or grow(s)])

    def _make_room(self) -> None:
        """Grants the pages that decodes need where they may not suffice: the strongest first, the weakest make way."""
        size = self._limits.page_size
        needy = [s for s in self._decoding.values() if s.num_planned >= len(s.pages) * size]
        if len(needy) <= self._residency.num_available:
            return
        for sequence in sorted(needy, key=lambda s: s.strength, reverse=True):
            while sequence.state is State.RUNNING and not self._residency.grow(sequence):
                if self._residency.any_leaving:
                    return  # their pages come first
                running = (*self._prefilling.values(), *self._decoding.values())
                self._preempt(min(running, key=lambda s: s.strength))

    def _plan_prefills(self, draft: Draft) -> None:
        """Chunks of the prompts under way, then of new ones, while the budget lasts."""
        for sequence in list(self._prefilling.values()):
            self._plan_chunk(draft, sequence)
        while draft.budget > 0:
            candidate = self._next_admission()
            if candidate is None:
                return
            sequence, start = candidate.sequence, len(candidate.path) * self._limits.page_size
            if self._chunk_len(sequence, start, draft.budget) == 0:
                return
            self._waiting.admit(sequence)
            self._residency.enter(sequence, candidate.path)
            self._waiting.charge(sequence.salt, len(sequence.token_ids) - start)
            if sequence.num_cached is None:
                sequence.num_cached = start
                self._num_cached_tokens += start
            self._prefilling[sequence.id] = sequence
            self._num_host_dependent += sequence.host_dependent
            draft.admit(sequence)
            self._plan_chunk(draft, sequence)

    def _next_admission(self) -> Candidate | None:
        return self._admission.next([*self._prefilling.values(), *self._decoding.values()])

    def _chunk_len(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of the chunk from `start` on: all that remain, or as many as end on a page boundary."""
        remaining = len(sequence.token_ids) - start
        if start < sequence.num_scored < sequence.num_prompt:  # what was told of the prompt is not told again
            remaining = min(remaining, sequence.num_scored - start)
        if remaining <= budget:
            return remaining
        return max((start + budget) // self._limits.page_size * self._limits.page_size - start, 0)

    def _plan_chunk(self, draft: Draft, sequence: Sequence) -> None:
        """A row for the next chunk, if the budget holds one."""
        length = self._chunk_len(sequence, sequence.num_planned, draft.budget)
        if length == 0:
            return
        draft.add_chunk(sequence, length)
        if sequence.num_planned == len(sequence.token_ids):
            del self._prefilling[sequence.id]
            self._decoding[sequence.id] = sequence

    # --- preempting -----------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's place away; it waits again, at once or when the steps in flight have landed."""
        self._num_preemptions += 1
        self._growth.preempted()
        self._stop_running(sequence)
        sequence.state = State.LEAVING
        if self._residency.leave(sequence):
            self._wait_again(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self._prefilling.pop(sequence.id, None)
        self._decoding.pop(sequence.id, None)
        self._num_host_dependent -= sequence.host_dependent

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._waiting.push(sequence, returns=True)

    # --- committing -----------------------------------------------------------------------------------------------

    def _commit_row(self, sequence: Sequence, row: PlannedRow, token_ids: list[int]) -> Output | None:
        """Appends a row's tokens up to the first that ends the request; None when there is nothing to tell yet."""
        known = sequence.token_ids
        num_tokens = len(row.token_ids) or 1
        end = row.start + num_tokens
        if sequence.node is not None and end // self._limits.page_size > sequence.num_attached:
            self._residency.attach(sequence, end)
        if row.start < sequence.num_prompt:
            self._commit_prompt(sequence, end, num_tokens)
        if not row.sample:
            if end < sequence.max_len:
                return None  # more of the prompt is to come
            self._finish(sequence)  # nothing was to be sampled: the prompt is scored
            return Output(sequence.id, finish_reason=FinishReason.LENGTH)
        if not token_ids:
            self._finish(sequence)
            return _failed(sequence.id, ErrorCode.INTERNAL, "the step sampled no token for this request")

        finish_reason = None
        for count, token_id in enumerate(token_ids, 1):
            known.append(token_id)
            if token_id in sequence.stop_ids:
                finish_reason = FinishReason.STOP
            elif len(known) >= sequence.max_len:
                finish_reason = FinishReason.LENGTH
            else:
                if sequence.guide is not None and (problem := _advance(sequence.guide, token_id)) is not None:
                    self._finish(sequence)
                    return _failed(sequence.id, ErrorCode.INTERNAL, problem)
                continue
            token_ids = token_ids[:count]
            break
        self._num_generated_tokens += len(token_ids)
        if len(token_ids) > 1:
            assert not sequence.num_pending, "a row yielded several tokens while the next one was under way"
            # Keys of all but the last token are in the pages.
            sequence.num_planned = len(known) - 1
        if finish_reason is not None:
            self._finish(sequence)
        return Output(sequence.id, token_ids, finish_reason)

    def _commit_prompt(self, sequence: Sequence, end: int, num_tokens: int) -> None:
        self._num_prompt_tokens += num_tokens
        if end >= sequence.num_prompt and sequence.request.group_id:
            for follower in self._groups.release(sequence):
                self._waiting.push(follower)

    # --- waiting and ending ---------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        """Waits for its turn, or first for the sample of its group that computes what both need."""
        shares = self._cache is not None and sequence.num_prompt > self._limits.page_size
        if sequence.request.group_id and shares and self._groups.join(sequence):
            return
        self._waiting.push(sequence)

    def _leave_group(self, sequence: Sequence, *, waits: bool) -> None:
        """Those who waited for its prompt wait for another of the group, who is next."""
        was_parked = self._groups.is_parked(sequence)
        followers = self._groups.release(sequence)
        if waits and not was_parked:
            self._waiting.remove(sequence)
        for follower in followers:
            self._enqueue(follower)

    def _finish(self, sequence: Sequence) -> None:
        """The request is over, whatever it was doing."""
        del self._live[sequence.id]
        self._guided.pop(sequence.id, None)
        state, sequence.state = sequence.state, State.FINISHED
        self._waiting.charge(sequence.salt, sequence.num_output)
        if sequence.request.group_id:
            self._leave_group(sequence, waits=state is State.WAITING)
        elif state is State.WAITING:
            self._waiting.remove(sequence)
        if state is State.RUNNING:
            self._stop_running(sequence)
            self._residency.leave(sequence)
        elif state is State.LEAVING and sequence.num_in_flight == 0:
            self._residency.landed(sequence)
        self._waiting.close_account(sequence.salt)


def _advance(guide: Guide, token_id: int) -> str | None:
    try:
        guide.advance(token_id)
    except GuideError as error:
        return str(error)
    return None


def _failed(request_id: RequestId, code: ErrorCode, message: str, field_name: str = "") -> Output:
    return Output(request_id, error=RequestError(code, message, field_name))
