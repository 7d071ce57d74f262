"""The loop of one rank: drain the inbox, plan, launch, collect, commit, publish. Owns no request state of its own.

With a runner that computes beside this thread, a step is launched before the one before it is collected, so that the
device never waits for the scheduler. A request that turns out to have ended then has one row too many in flight, whose
token is thrown away.

A step that raises is taken apart: its rows run again one by one, which rewrites the same page contents and samples the
same tokens, so the row at fault is found and its neighbours lose nothing. A step that was launched behind it is taken
apart in its turn, since what it took from the device may be wrong. When every row raises, a one-token probe on the sink
page tells whether the requests or the runner are at fault; only a broken runner ends the engine. One that says so
itself (RunnerLostError) does at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.messages import (
    Abort,
    AbortStream,
    Command,
    Event,
    Flush,
    Flushed,
    PeerTried,
    StepDone,
    Submit,
    Survey,
    Surveyed,
    TryPeer,
    to_columns,
)
from baleen_worker.news import News
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, PlannedRow, RunnerLostError, StepOutput, StepPlan
from baleen_worker.transfer.orders import LegNews, Peer, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baleen_worker.grammar.room import GrammarRoom
    from baleen_worker.output import Load, Output
    from baleen_worker.request import Request, RequestId
    from baleen_worker.scheduler import Scheduler
    from baleen_worker.step import Runner, StepHandle
    from baleen_worker.transfer.orders import News as TransferNews
    from baleen_worker.transfer.orders import Order

# How long a command may wait while nothing but grammars or masks are being made.
_NAP_S = 0.002
# How late a deadline may be noticed while nothing but transfers is under way.
_LONG_NAP_S = 0.05

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where commands come from."""

    def drain(self, *, wait: bool) -> Sequence[Command]:
        """All commands that have arrived, oldest first; with `wait`, at least one."""
        ...


class Outbox(Protocol):
    """Where news goes."""

    def publish(self, event: Event) -> None:
        """Sends one event; never drops it."""
        ...


class Transfer(Protocol):
    """Moves pages of legs between workers, in a thread of its own."""

    def give(self, orders: Sequence[Order]) -> None:
        """Hands orders over."""
        ...

    def take(self) -> list[TransferNews]:
        """News since the last call."""
        ...

    def account(self, load: Load) -> Load:
        """The load with the transfer's counters filled in."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there is news or a command, or the time is over."""
        ...

    def close(self) -> None:
        """Ends the thread."""
        ...


class RunnerBrokenError(RuntimeError):
    """The runner cannot compute anything any more."""


@dataclass(slots=True)
class _Flight:
    """A step that is launched; `handle` None: it is to be taken apart, because it or the one before it raised."""

    plan: StepPlan
    handle: StepHandle | None


class Engine:
    """Drives one runner with one scheduler, in one thread, with up to `depth` steps in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        *,
        depth: int = 1,
        room: GrammarRoom | None = None,
        transfer: Transfer | None = None,
        on_broken: Callable[[], None] = lambda: None,
        clock_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        """`depth` 1: a step is collected before the next is planned.

        `room`: where requests with a constraint wait for their grammar; without one, there must be none.
        `transfer`: what moves the pages of legs; without one, there must be no legs.
        `on_broken`: called when the runner is found to be broken, before RunnerBrokenError is raised.
        """
        self._depth = depth
        self._flights: deque[_Flight] = deque()
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._room = room
        self._transfer = transfer
        self._on_broken = on_broken
        self._clock_ms = clock_ms
        self._num_probes = 0
        self._step = 0
        self._waits = False
        self._load = scheduler.load

    def run(self) -> None:
        """Turns for ever; sleeps on the inbox while there is nothing to do. Raises RunnerBrokenError."""
        try:
            while True:
                self.turn(wait=True)
        finally:
            if self._room is not None:
                self._room.close()
            if self._transfer is not None:
                self._transfer.close()

    def turn(self, *, wait: bool = False) -> bool:
        """One turn of the loop; returns whether a step was launched or collected.

        `wait` blocks for a command when idle.
        """
        scheduler = self._scheduler
        was_idle = self._idle
        news = News()
        for command in self._inbox.drain(wait=wait and was_idle and not self._num_probes):
            self._apply(command, news.outputs)
        if self._transfer is not None:
            news.outputs += scheduler.hear(self._legs_of(self._transfer.take()))
        news.outputs += scheduler.expire(self._clock_ms())
        if self._room:
            self._leave_room(self._room, news.outputs)
        news.outputs += scheduler.end_exhausted()
        try:
            progress = self._step_once(news)
        except RunnerLostError as error:
            self._on_broken()
            raise RunnerBrokenError(f"{error.what}: {error}") from error
        if self._transfer is not None:  # after the launch: the plan's own copies of pages come first
            self._transfer.give(scheduler.take_orders())
        load = self._current_load
        events = scheduler.take_cache_events()
        if news or events or load != self._load:
            self._load = load
            self._outbox.publish(StepDone(self._step, to_columns(news), load, events))
        if not scheduler.idle:
            assert progress or self._waits, "requests are live but no step can be planned"
        elif not was_idle:
            scheduler.check_idle()
        if not progress and wait and (self._num_probes or not self._idle):
            self._nap()
        return progress

    def _nap(self) -> None:
        """Until something else has come that may move a request, or somebody's deadline."""
        if self._transfer is not None and (self._num_probes or self._scheduler.waits_for_peers):
            self._transfer.wait(_NAP_S if self._room else _LONG_NAP_S)
        elif self._room is not None:
            self._room.wait(_NAP_S)

    @property
    def _idle(self) -> bool:
        return self._scheduler.idle and not self._room

    @property
    def _current_load(self) -> Load:
        load = self._scheduler.load
        if self._transfer is not None:
            load = self._transfer.account(load)
        if not self._room:
            return load
        return msgspec.structs.replace(load, waiting_requests=load.waiting_requests + len(self._room))

    def _step_once(self, news: News) -> bool:
        """Launches the next step and collects the oldest, if there are as many in flight as there may be."""
        flights = self._flights
        # Masks and plugins need the last token on the host before the next row can be planned.
        depth = 1 if self._scheduler.host_decides else self._depth
        while len(flights) >= depth:
            self._land(news)
        waits_for_masks = self._scheduler.waits_for_masks  # asked first: a mask may get ready meanwhile
        plan = self._scheduler.plan()
        self._waits = waits_for_masks or self._scheduler.waits_for_peers
        if plan is not None:
            self._launch(plan)
        elif not flights:
            return False
        if plan is None or len(flights) >= depth:
            self._land(news)
        return True

    def _apply(self, command: Command, outputs: list[Output]) -> None:
        scheduler = self._scheduler
        match command:
            case Submit(requests):
                now_ms = self._clock_ms()
                outputs += [refusal for request in requests if (refusal := self._add(request, now_ms))]
            case Abort(ids):
                outputs += [end for request_id in ids if (end := self._abort(request_id))]
            case AbortStream(stream):  # nobody is left to be told
                scheduler.abort_stream(stream)
                if self._room is not None:
                    self._room.abort_stream(stream)
            case Flush(ticket):
                self._outbox.publish(Flushed(ticket, scheduler.flush() if self._idle else None))
            case Survey(stream):
                self._outbox.publish(Surveyed(stream, scheduler.cached_page_hashes()))
            case TryPeer(ticket, address, boot_epoch, dp_rank):
                assert self._transfer is not None, "a trial was accepted where nothing is transferred"
                self._num_probes += 1
                self._transfer.give([Probe(ticket, Peer(address, boot_epoch, dp_rank))])

    def _legs_of(self, news: Sequence[TransferNews]) -> list[LegNews]:
        """What is about legs; trials that have ended are told at once."""
        legs: list[LegNews] = []
        for entry in news:
            if isinstance(entry, LegNews):
                legs.append(entry)
            else:
                self._num_probes -= 1
                self._outbox.publish(PeerTried(entry.ticket, entry.seconds, entry.failure))
        return legs

    def _add(self, request: Request, now_ms: float) -> Output | None:
        if request.constraint is None:
            return self._scheduler.add(request, now_ms)
        assert self._room is not None, "a constraint was accepted that nothing here can compile"
        return self._room.enter(request, now_ms)

    def _abort(self, request_id: RequestId) -> Output | None:
        in_room = None if self._room is None else self._room.abort(request_id)
        return in_room or self._scheduler.abort(request_id)

    def _leave_room(self, room: GrammarRoom, outputs: list[Output]) -> None:
        """Requests whose grammar is ready go on to the scheduler, those that cannot be served end."""
        outputs += room.expire(self._clock_ms())
        admitted, ends = room.leave()
        outputs += ends
        for entry in admitted:
            refusal = self._scheduler.add(entry.request, entry.arrival_ms, entry.guide)
            if refusal is not None:
                outputs.append(refusal)

    def _launch(self, plan: StepPlan) -> None:
        handle = None
        try:
            handle = self._runner.launch(plan)
        except RunnerLostError:
            raise
        except Exception:
            logger.warning("the launch of step %d raised; its rows run again one by one", plan.step, exc_info=True)
        self._flights.append(_Flight(plan, handle))

    def _land(self, news: News) -> None:
        """Collects and commits the oldest step in flight."""
        flight = self._flights.popleft()
        self._step = flight.plan.step
        news.follow(self._scheduler.commit(flight.plan, self._collect(flight)))

    def _collect(self, flight: _Flight) -> StepOutput:
        if flight.handle is not None:
            try:
                return flight.handle.collect()
            except RunnerLostError:
                raise
            except Exception:
                logger.warning("step %d raised; its rows run again one by one", flight.plan.step, exc_info=True)
        for later in self._flights:
            if later.handle is not None:
                with contextlib.suppress(Exception):
                    later.handle.collect()
                later.handle = None
        return self._compute_one_by_one(flight.plan)

    def _compute_one_by_one(self, plan: StepPlan) -> StepOutput:
        token_ids: list[list[int]] = [[] for _ in plan.rows]
        merged = StepOutput(plan.step, token_ids)
        alone = self._scheduler.rows_alone(plan)
        for index, row_plan in alone.items():
            try:
                output = self._runner.launch(row_plan).collect()
            except RunnerLostError:
                raise
            except Exception as error:
                logger.exception("the request in slot %d is ended: its row raises", plan.rows[index].slot)
                merged.errors[index] = f"the engine failed on this request ({type(error).__name__}); its log says more"
                continue
            token_ids[index] = output.token_ids[0]
            for into, out in (
                (merged.logprobs, output.logprobs),
                (merged.prompt_logprobs, output.prompt_logprobs),
                (merged.errors, output.errors),
            ):
                if 0 in out:
                    into[index] = out[0]  # pyright: ignore[reportArgumentType] - pairs of equal dict types
        if alone and len(merged.errors) == len(alone):
            self._probe(plan)
        return merged

    def _probe(self, plan: StepPlan) -> None:
        """Computes one token on the sink page, in a slot whose request has just failed."""
        slot = plan.rows[0].slot
        admission = Admission(slot, SamplingParams(max_tokens=1, seed=0, temperature=0.0))
        row = PlannedRow(slot, 0, [0], 0, [SINK_PAGE], True, 0)
        try:
            self._runner.launch(StepPlan(plan.step, [admission], [row])).collect()
        except Exception as error:
            self._on_broken()
            raise RunnerBrokenError(f"the model runner fails on any input: {type(error).__name__}: {error}") from error
