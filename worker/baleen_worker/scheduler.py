"""Decides what each engine step computes. Owns every request's token state; does no I/O, reads no clock.

`plan` turns waiting and running requests into a StepPlan, `commit` takes the step's output back. Several plans may be
in flight at once (they are committed in order), so whatever a step refers to, pages and slot, is given back only once
that step is committed, however early its request ended.

Admission reserves every page that a request may ever need before the request gets its first one. Running requests can
therefore always go on: nothing over-commits, deadlocks or is preempted. A request at the head of the queue that does
not fit holds back those behind it, so none starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baleen_worker.output import Load, Output, RequestError
from baleen_worker.request import ErrorCode, FinishReason, Request, RequestId
from baleen_worker.residency import Residency
from baleen_worker.sequence import Deadlines, Sequence, State, WaitingQueue, admission_of
from baleen_worker.step import Admission, PlannedRow, StepOutput, StepPlan

if TYPE_CHECKING:
    from baleen_worker.cache.pages import PagePool


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_step_tokens`: tokens one step may compute, decodes included; at least one page of them."""

    max_running_requests: int
    max_step_tokens: int
    max_queued_requests: int
    page_size: int = 64

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.page_size:
            raise ValueError(f"a step of {self.max_step_tokens} tokens cannot hold a page of {self.page_size}")
        if self.max_running_requests < 1 or self.max_queued_requests < 1:
            raise ValueError("at least one request must be able to run and to wait")


class Scheduler:
    """Waiting and running requests of one rank."""

    def __init__(self, limits: SchedulerLimits, pages: PagePool) -> None:
        self._limits = limits
        self._pages = pages
        self._residency = Residency(limits.max_running_requests, limits.page_size, pages)
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue()
        self._prefilling: dict[RequestId, Sequence] = {}
        self._decoding: dict[RequestId, Sequence] = {}
        self._deadlines = Deadlines()
        self._flights: deque[_Draft] = deque()
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request, now_ms: float) -> Output | None:
        """Queues a request that was validated against limits and context. Returns an output when it is refused."""
        if request.id in self._live:
            return _failed(request.id, ErrorCode.INVALID_ARGUMENT, "the key names a request that still runs", "key")
        if len(self._waiting) >= self._limits.max_queued_requests:
            message = f"{len(self._waiting)} requests are waiting already: retry later or on another worker"
            return _failed(request.id, ErrorCode.RESOURCE_EXHAUSTED, message)
        num_pages = self._residency.pages_for(len(request.prompt_token_ids) + request.sampling.max_tokens)
        if num_pages > self._pages.capacity:
            message = f"{num_pages} pages are needed and the worker has {self._pages.capacity}: lower max_tokens"
            return _failed(request.id, ErrorCode.INVALID_ARGUMENT, message, "max_tokens")

        sequence = Sequence(request, reserved_pages=num_pages)
        self._live[request.id] = sequence
        self._waiting.push(sequence)
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

    # --- one step -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed before an earlier step is committed."""
        draft = _Draft(self._limits.max_step_tokens)
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
            sequence.num_in_flight -= 1
            if sequence.state is State.FINISHED:
                self._residency.landed(sequence)
                continue
            if index in errors:
                self._finish(sequence)
                outputs.append(_failed(sequence.id, ErrorCode.INTERNAL, errors[index]))
                continue
            told = self._commit_row(sequence, rows[index], output.token_ids[index])
            if index in prompt_logprobs:
                told = told or Output(sequence.id)
                told.prompt_logprobs = prompt_logprobs[index]
            if told is not None:
                told.logprobs = logprobs.get(index)
                outputs.append(told)
        return outputs

    # --- what others may ask --------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is live and no step is in flight."""
        return not self._live and not self._flights

    @property
    def load(self) -> Load:
        """Counters for routing and display."""
        prefilling = sum(s.num_prompt - s.num_planned for s in self._prefilling.values())
        return Load(
            running_requests=len(self._prefilling) + len(self._decoding),
            waiting_requests=len(self._waiting),
            used_pages=self._pages.num_used,
            total_pages=self._pages.capacity,
            waiting_prompt_tokens=self._waiting.num_prompt_tokens + prefilling,
            steps=self._num_steps,
            generated_tokens=self._num_generated_tokens,
            prompt_tokens=self._num_prompt_tokens,
        )

    def check(self) -> None:
        """Asserts that all pages, slots and requests are accounted for. Costs O(pages): for tests and idle times."""
        running = [*self._prefilling.values(), *self._decoding.values()]
        self._residency.check(running)
        assert all(sequence.state is State.RUNNING for sequence in running), "a sequence that is over still runs"
        assert len(self._live) == len(self._waiting) + len(running), "a live request neither waits nor runs"
        if self.idle:
            assert self._pages.num_used == 0, "nothing is live but pages are held"

    # --- planning -------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: _Draft, max_rows: int) -> None:
        """One row for each sequence whose last token is known."""
        page_size = self._limits.page_size
        sequences = list(self._decoding.values())
        if len(sequences) > max_rows:
            sequences = sequences[:max_rows]
            for sequence in sequences:  # they go to the back of the line
                self._decoding[sequence.id] = self._decoding.pop(sequence.id)
        for sequence in sequences:
            start = sequence.num_planned
            token_ids = sequence.token_ids
            end = len(token_ids)
            if start == end:
                continue  # its token is still being computed
            first_new_page = len(sequence.pages)
            new_pages = self._residency.grow(sequence, end) if end > first_new_page * page_size else ()
            row = PlannedRow(
                sequence.slot, start, token_ids[start:], first_new_page, new_pages, True, end - sequence.num_prompt
            )
            draft.add(sequence, row, end)

    def _plan_prefills(self, draft: _Draft) -> None:
        """Chunks of the prompts under way, then of new ones, while the budget lasts."""
        for sequence in list(self._prefilling.values()):
            self._plan_chunk(draft, sequence)
        while draft.budget > 0:
            sequence = self._next_admission()
            if sequence is None or self._chunk_len(sequence, draft.budget) == 0:
                return
            self._waiting.remove(sequence)
            self._residency.enter(sequence)
            self._prefilling[sequence.id] = sequence
            draft.admissions.append(admission_of(sequence))
            self._plan_chunk(draft, sequence)

    def _next_admission(self) -> Sequence | None:
        sequence = self._waiting.first()
        return sequence if sequence is not None and self._residency.has_room(sequence) else None

    def _chunk_len(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk: all that remain, or as many as end on a page boundary."""
        start = sequence.num_planned
        remaining = len(sequence.token_ids) - start
        if remaining <= budget:
            return remaining
        return max((start + budget) // self._limits.page_size * self._limits.page_size - start, 0)

    def _plan_chunk(self, draft: _Draft, sequence: Sequence) -> None:
        """A row for the next chunk, if the budget holds one."""
        length = self._chunk_len(sequence, draft.budget)
        if length == 0:
            return
        start, end = sequence.num_planned, sequence.num_planned + length
        sampling = sequence.request.sampling
        last = end == len(sequence.token_ids)
        row = PlannedRow(
            slot=sequence.slot,
            start=start,
            token_ids=sequence.token_ids[start:end],
            first_new_page=len(sequence.pages),
            new_pages=self._residency.grow(sequence, end),
            sample=last and sampling.max_tokens > 0,
            output_index=0,
            score_token_ids=() if sampling.prompt_logprobs is None else sequence.token_ids[start + 1 : end + 1],
        )
        draft.add(sequence, row, end)
        if last:
            del self._prefilling[sequence.id]
            self._decoding[sequence.id] = sequence

    # --- committing -----------------------------------------------------------------------------------------------

    def _commit_row(self, sequence: Sequence, row: PlannedRow, token_ids: list[int]) -> Output | None:
        """Appends a row's tokens up to the first that ends the request; None when there is nothing to tell yet."""
        if row.start < sequence.num_prompt:
            self._num_prompt_tokens += len(row.token_ids)
        if not row.sample:
            if row.start + len(row.token_ids) < sequence.max_len:
                return None  # more of the prompt is to come
            self._finish(sequence)  # nothing was to be sampled: the prompt is scored
            return Output(sequence.id, finish_reason=FinishReason.LENGTH)
        if not token_ids:
            self._finish(sequence)
            return _failed(sequence.id, ErrorCode.INTERNAL, "the step sampled no token for this request")

        known = sequence.token_ids
        finish_reason = None
        for count, token_id in enumerate(token_ids, 1):
            known.append(token_id)
            if token_id in sequence.stop_ids:
                finish_reason = FinishReason.STOP
            elif len(known) >= sequence.max_len:
                finish_reason = FinishReason.LENGTH
            else:
                continue
            token_ids = token_ids[:count]
            break
        self._num_generated_tokens += len(token_ids)
        # Keys of all but the last token are in the pages, also when the step verified several at once.
        sequence.num_planned = len(known) - 1
        if finish_reason is not None:
            self._finish(sequence)
        return Output(sequence.id, token_ids, finish_reason)

    def _finish(self, sequence: Sequence) -> None:
        """The request is over, whatever it was doing."""
        del self._live[sequence.id]
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            sequence.state = State.FINISHED
            return
        self._prefilling.pop(sequence.id, None)
        self._decoding.pop(sequence.id, None)
        self._residency.leave(sequence)


@dataclass(slots=True)
class _Draft:
    """A step being planned, then in flight: its rows and, beside each, the sequence it belongs to."""

    budget: int
    rows: list[PlannedRow] = field(default_factory=list[PlannedRow])
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    admissions: list[Admission] = field(default_factory=list[Admission])

    def add(self, sequence: Sequence, row: PlannedRow, end: int) -> None:
        """Appends a row that computes the sequence up to position `end`."""
        self.rows.append(row)
        self.sequences.append(sequence)
        self.budget -= len(row.token_ids)
        sequence.num_planned = end
        sequence.num_in_flight += 1


def _failed(request_id: RequestId, code: ErrorCode, message: str, field_name: str = "") -> Output:
    return Output(request_id, error=RequestError(code, message, field_name))
