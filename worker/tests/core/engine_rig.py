"""A scheduler and a fake runner to be driven step by step, and a ledger that checks every word they say.

The ledger knows each request and what the fake runner must answer to it, so every output is checked the moment it
appears: right tokens in the right order, one end, nothing after the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baleen_worker.cache.host import HostTier, WritePolicy
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.fake_runner import FakeRunner, expected_logprobs, expected_tokens
from baleen_worker.messages import Command, Event, LogprobColumns, StepDone, StreamColumns
from baleen_worker.output import Output
from baleen_worker.request import ErrorCode, FinishReason, Request, RequestId, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import StepHandle, StepOutput, StepPlan, TokenLogprobs
from baleen_worker.waiting import Policy

VOCAB_SIZE = 499
PAGE_SIZE = 64


def make_request(
    key: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stream: int = 1,
    stop_token_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    priority: int = 0,
    deadline_ms: int | None = None,
    cache_salt: str = "",
    group_id: bytes = b"",
    resumed_token_ids: Sequence[int] = (),
) -> Request:
    """A request with neutral sampling."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=7,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(
        (stream, key),
        list(prompt),
        sampling,
        priority=priority,
        deadline_ms=deadline_ms,
        cache_salt=cache_salt,
        group_id=group_id,
        resumed_token_ids=list(resumed_token_ids),
    )


def answer_to(request: Request) -> list[int]:
    """What the fake runner must say to a request that nobody interrupts, after what was said before."""
    sampling = request.sampling
    tokens = expected_tokens(request.prompt_token_ids, sampling.max_tokens, VOCAB_SIZE)
    ends = [index for index, token in enumerate(tokens) if token in sampling.stop_token_ids]
    resumed = request.resumed_token_ids
    assert tokens[: len(resumed)] == resumed, "the fake runner would never have said that"
    return tokens[len(resumed) : ends[0] + 1] if ends else tokens[len(resumed) :]


@dataclass
class Account:
    """One request and what it has been told so far."""

    request: Request
    answer: list[int]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    prompt_token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[float] = field(default_factory=list[float])
    end: FinishReason | ErrorCode | None = None
    interrupted: bool = False
    cached_tokens: int = 0


class Ledger:
    """Every request and every word about it."""

    def __init__(self) -> None:
        self.accounts: dict[RequestId, Account] = {}

    def open(self, request: Request) -> None:
        """A request is about to be submitted."""
        assert request.id not in self.accounts, "the test used an id twice"
        self.accounts[request.id] = Account(request, answer_to(request))

    def interrupt(self, request_id: RequestId) -> None:
        """A request may end early from now on."""
        self.accounts[request_id].interrupted = True

    @property
    def live(self) -> list[RequestId]:
        """Requests that have not ended."""
        return [request_id for request_id, account in self.accounts.items() if account.end is None]

    def enter(self, outputs: Iterable[Output]) -> None:
        """Checks outputs as they appear."""
        for output in outputs:
            account = self.accounts[output.id]
            assert account.end is None, f"{output.id} was told something after its end: {output}"
            account.token_ids += output.token_ids
            if output.token_ids:
                assert account.cached_tokens in (0, output.cached_tokens), "the count of cached tokens has changed"
                account.cached_tokens = output.cached_tokens
            assert account.token_ids == account.answer[: len(account.token_ids)], f"{output.id} got wrong tokens"
            if output.logprobs is not None:
                assert output.logprobs.token_ids == output.token_ids
                account.logprobs += output.logprobs.logprobs
                assert {len(top) for top in output.logprobs.top_token_ids} == {account.request.sampling.logprobs}
            if output.prompt_logprobs is not None:
                account.prompt_token_ids += output.prompt_logprobs.token_ids
                account.prompt_logprobs += output.prompt_logprobs.logprobs
            if output.error is not None:
                account.end = output.error.code
            elif output.finish_reason is not None:
                account.end = output.finish_reason
                self._check_end(account)

    def enter_columns(self, stream: StreamColumns) -> None:
        """The same for one stream's columns of a step."""
        outputs: list[Output] = []
        start = 0
        logprobs, prompt_logprobs = by_row(stream.logprobs), by_row(stream.prompt_logprobs)
        columns = zip(stream.keys, stream.token_counts, stream.finish_reasons, strict=True)
        for row, (key, count, reason) in enumerate(columns):
            output = Output((stream.stream, key), stream.token_ids[start : start + count].tolist())
            output.finish_reason = FinishReason(reason) if reason else None
            output.cached_tokens = stream.cached_tokens[row]
            output.logprobs, output.prompt_logprobs = logprobs.get(row), prompt_logprobs.get(row)
            outputs.append(output)
            start += count
        assert start == len(stream.token_ids)
        outputs += [Output((stream.stream, key), error=error) for key, error in stream.errors]
        self.enter(outputs)

    def _check_end(self, account: Account) -> None:
        request = account.request
        if account.end is FinishReason.ABORT:
            assert account.interrupted, f"{request.id} was aborted by nobody"
            return
        assert account.token_ids == account.answer, f"{request.id} ended early"
        stopped = bool(account.answer) and account.answer[-1] in request.sampling.stop_token_ids
        assert account.end is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        known = request.prompt_token_ids + request.resumed_token_ids
        if request.sampling.logprobs is not None:
            assert account.logprobs == expected_logprobs(known + account.answer, len(known))
        if request.sampling.prompt_logprobs is not None and not request.resumed_token_ids:
            assert account.prompt_token_ids == request.prompt_token_ids[1:]
            assert account.prompt_logprobs == expected_logprobs(request.prompt_token_ids, 1)


def by_row(columns: LogprobColumns | None) -> dict[int, TokenLogprobs]:
    """Log-probabilities of each row, read back from columns as a gateway does."""
    described: dict[int, TokenLogprobs] = {}
    if columns is None:
        return described
    tokens = zip(columns.token_ids, columns.logprobs, columns.top_counts, strict=True)
    tops = zip(columns.top_token_ids, columns.top_logprobs, strict=True)
    for row, count in zip(columns.rows, columns.counts, strict=True):
        entry = described[row] = TokenLogprobs()
        for token_id, logprob, num_top in (next(tokens) for _ in range(count)):
            top = [next(tops) for _ in range(num_top)]
            entry.token_ids.append(token_id)
            entry.logprobs.append(logprob)
            entry.top_token_ids.append([token for token, _ in top])
            entry.top_logprobs.append([value for _, value in top])
    assert next(tokens, None) is None
    assert next(tops, None) is None
    return described


class Rig:
    """Scheduler and fake runner, with steps launched and landed one by one, up to any depth."""

    def __init__(
        self,
        *,
        num_pages: int = 33,
        max_running: int = 4,
        max_step_tokens: int = 128,
        max_queued: int = 1000,
        runner: FakeRunner | None = None,
        with_cache: bool = True,
        max_idle_pages: int | None = None,
        policy: Policy = Policy.FCFS,
        conservativeness: float = 1.0,
        preemption_threshold: int = 10,
        num_host_pages: int = 0,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        self.limits = SchedulerLimits(
            max_running,
            max_step_tokens,
            max_queued,
            policy=policy,
            conservativeness=conservativeness,
            preemption_threshold=preemption_threshold,
        )
        self.runner = runner or FakeRunner(num_pages, VOCAB_SIZE, num_host_pages=num_host_pages)
        self.pages = PagePool(num_pages, on_free=self.runner.poison)
        self.host = HostTier(num_host_pages, write_policy) if num_host_pages else None
        self.cache = PrefixCache(self.pages, max_idle_pages=max_idle_pages, host=self.host) if with_cache else None
        self.scheduler = Scheduler(self.limits, self.pages, self.cache)
        self.ledger = Ledger()
        self.flights: deque[tuple[StepPlan, StepHandle]] = deque()
        self.now_ms = 0.0
        self.num_steps = 0
        self._slot_max_tokens: dict[int, int] = {}
        self._prefilling_slots: set[int] = set()

    def submit(self, request: Request) -> None:
        """Adds a request."""
        self.ledger.open(request)
        refusal = self.scheduler.add(request, self.now_ms)
        if refusal is not None:
            self.ledger.enter([refusal])

    def abort(self, request_id: RequestId) -> None:
        """Aborts one request, whatever its state."""
        self.ledger.interrupt(request_id)
        output = self.scheduler.abort(request_id)
        if output is not None:
            self.ledger.enter([output])

    def launch(self) -> StepPlan | None:
        """Plans and launches a step, if there is anything to compute."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.check_budgets(plan)
            self.flights.append((plan, self.runner.launch(plan)))
            self.num_steps += 1
        return plan

    def land(self) -> StepOutput:
        """Collects and commits the oldest step in flight."""
        plan, handle = self.flights.popleft()
        output = handle.collect()
        assert not output.errors, output.errors
        self.ledger.enter(self.scheduler.commit(plan, output))
        return output

    def step(self) -> StepPlan | None:
        """One step at depth 0."""
        plan = self.launch()
        if plan is not None:
            self.land()
        return plan

    def finish(self) -> None:
        """Runs until nothing is left, then checks that everybody ended and everything came back."""
        while not self.scheduler.idle:
            if self.launch() is None:
                assert self.flights, "requests are live, but nothing is planned or in flight"
            while self.flights:
                self.land()
            self.scheduler.check()
        assert not self.ledger.live, "a request never ended"
        assert self.scheduler.load.used_pages == 0

    def check_budgets(self, plan: StepPlan) -> None:
        """What holds of every plan."""
        assert 0 < plan.num_tokens <= self.limits.max_step_tokens
        slots = [row.slot for row in plan.rows]
        assert len(slots) == len(set(slots)) <= self.limits.max_running_requests
        assert {admission.slot for admission in plan.admissions} <= set(slots)
        self._slot_max_tokens |= {admission.slot: admission.sampling.max_tokens for admission in plan.admissions}
        self._prefilling_slots |= {admission.slot for admission in plan.admissions}
        prefills_begun = False
        for row in plan.rows:
            is_prefill = row.slot in self._prefilling_slots
            assert is_prefill or (row.num_tokens == 1 and row.sample)
            assert is_prefill or not prefills_begun, "a decode row follows a prefill chunk"
            prefills_begun = prefills_begun or is_prefill
            end = row.start + row.num_tokens
            if row.sample:
                self._prefilling_slots.discard(row.slot)
            if not row.sample and self._slot_max_tokens[row.slot] > 0:
                assert end % PAGE_SIZE == 0, "a chunk ends inside a page, before the prompt ends"
            assert row.first_new_page * PAGE_SIZE + len(row.new_pages) * PAGE_SIZE >= end


class Lines:
    """In-process inbox and outbox of an Engine."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []

    def drain(self, *, wait: bool) -> list[Command]:
        """All commands given since the last call; `wait` would block for ever when there is none."""
        assert not wait or self.commands, "the engine sleeps with nothing to wake it"
        commands, self.commands = self.commands, []
        return commands

    def publish(self, event: Event) -> None:
        """Keeps an event."""
        self.events.append(event)

    def steps(self) -> list[StepDone]:
        """Takes the step events published since the last call."""
        steps = [event for event in self.events if isinstance(event, StepDone)]
        self.events = []
        return steps
