"""The loop of one rank: drain the inbox, plan, launch, collect, commit, publish. Owns no request state of its own.

A step that raises is taken apart: its rows run again one by one, which rewrites the same page contents and samples the
same tokens, so the row at fault is found and its neighbours lose nothing. When every row raises, a one-token probe on
the sink page tells whether the requests or the runner are at fault; only a broken runner ends the engine.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from baleen_worker.cache.pages import SINK_PAGE
from baleen_worker.messages import Abort, AbortStream, Command, Event, Flush, Flushed, StepDone, Submit, to_columns
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, PlannedRow, StepOutput, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baleen_worker.output import Output
    from baleen_worker.scheduler import Scheduler
    from baleen_worker.step import Runner

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


class RunnerBrokenError(RuntimeError):
    """The runner cannot compute anything any more."""


class Engine:
    """Drives one runner with one scheduler, in one thread; a step is collected before the next is planned."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        *,
        clock_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock_ms = clock_ms
        self._step = 0
        self._load = scheduler.load

    def run(self) -> None:
        """Turns for ever; sleeps on the inbox while there is nothing to do. Raises RunnerBrokenError."""
        while True:
            self.turn(wait=True)

    def turn(self, *, wait: bool = False) -> bool:
        """One turn of the loop; returns whether a step was computed. `wait` blocks for a command when idle."""
        scheduler = self._scheduler
        was_idle = scheduler.idle
        outputs: list[Output] = []
        for command in self._inbox.drain(wait=wait and was_idle):
            self._apply(command, outputs)
        outputs += scheduler.expire(self._clock_ms())
        plan = scheduler.plan()
        if plan is not None:
            self._step = plan.step
            outputs += scheduler.commit(plan, self._execute(plan))
        load = scheduler.load
        if outputs or load != self._load:
            self._load = load
            self._outbox.publish(StepDone(self._step, to_columns(outputs), load))
        if not scheduler.idle:
            assert plan is not None, "requests are live but no step can be planned"
        elif not was_idle:
            scheduler.check_idle()
        return plan is not None

    def _apply(self, command: Command, outputs: list[Output]) -> None:
        scheduler = self._scheduler
        match command:
            case Submit(requests):
                now_ms = self._clock_ms()
                outputs += [refusal for request in requests if (refusal := scheduler.add(request, now_ms))]
            case Abort(ids):
                outputs += [end for request_id in ids if (end := scheduler.abort(request_id))]
            case AbortStream(stream):
                scheduler.abort_stream(stream)  # nobody is left to be told
            case Flush(ticket):
                self._outbox.publish(Flushed(ticket, scheduler.flush()))

    def _execute(self, plan: StepPlan) -> StepOutput:
        try:
            return self._runner.launch(plan).collect()
        except Exception:
            logger.warning("step %d raised; its %d rows run again one by one", plan.step, len(plan.rows), exc_info=True)
        return self._execute_one_by_one(plan)

    def _execute_one_by_one(self, plan: StepPlan) -> StepOutput:
        admissions = {admission.slot: admission for admission in plan.admissions}
        merged = StepOutput(plan.step, [[] for _ in plan.rows])
        for index, row in enumerate(plan.rows):
            admission = admissions.get(row.slot)
            alone = StepPlan(plan.step, [] if admission is None else [admission], [row])
            try:
                output = self._runner.launch(alone).collect()
            except Exception as error:
                logger.exception("the request in slot %d is ended: its row raises", row.slot)
                merged.errors[index] = f"the engine failed on this request ({type(error).__name__}); its log says more"
                continue
            merged.token_ids[index] = output.token_ids[0]
            for into, out in (
                (merged.logprobs, output.logprobs),
                (merged.prompt_logprobs, output.prompt_logprobs),
                (merged.errors, output.errors),
            ):
                if 0 in out:
                    into[index] = out[0]  # pyright: ignore[reportArgumentType] - pairs of equal dict types
        if len(merged.errors) == len(plan.rows):
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
            raise RunnerBrokenError(f"the model runner fails on any input: {type(error).__name__}: {error}") from error
