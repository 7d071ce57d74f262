"""Keeps a record of what the runner does, and ends a rank whose runner does not come back.

A device that hangs never raises: whoever waits for it waits for ever, and the requests with them. So each call of the
runner is timed from a thread of its own. Past the limit, the rank's state goes to the log (the steps in flight with
their rows, the last ones done, the kernels, the stack of every thread), its last words to the head, and it ends. A
runner that raises leaves the same record behind; what is to be done about it is the engine's business.

A library may also wait for the device with the interpreter's lock in its hands, so that not even this thread runs.
That ends the rank a little later, see `last_words`.

Owns that thread and the record. Knows nothing of devices: it looks at the clock alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baleen_worker import last_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baleen_worker.step import PlannedRow, Runner, StepHandle, StepOutput, StepPlan

_LAST_STEPS = 16
_MOST_ROWS = 64
_LOOKS = 20  # in the time of the limit
_LONGEST_PAUSE_S = 1.0
_GRACE_S = 1.0  # for a thread that must share the processor

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Done:
    """A step that was collected, or that raised: then `failure` says what."""

    step: int
    num_rows: int
    seconds: float
    failure: str = ""

    def __str__(self) -> str:
        end = f" raised {self.failure}" if self.failure else ""
        return f"step {self.step}: {self.num_rows} rows, {self.seconds * 1000:.1f} ms{end}"


class WatchedRunner:
    """A `Runner` before another one, watched."""

    def __init__(
        self,
        inner: Runner,
        *,
        limit_s: float,
        features: Sequence[str],
        on_stall: Callable[[str], None],
        owns_process: bool = False,
    ) -> None:
        """`features`: what the runner computes with, for the record.

        `on_stall` gets one sentence, in the watching thread, when a call has taken longer than `limit_s`; it must end
        the process. The thread that made the call does not return from it any more.
        `owns_process`: the process is ended, without a sentence, also where no Python can run.
        """
        self._inner = inner
        self._limit_s = limit_s
        self._features = features
        self._on_stall = on_stall
        self._owns_process = owns_process
        self._lock = threading.Lock()
        self._call: tuple[str, int, float] | None = None  # which half of which step since when
        self._stalled = False
        self._flights: deque[tuple[StepPlan, float]] = deque()
        self._done: deque[_Done] = deque(maxlen=_LAST_STEPS)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner`."""
        flight = (plan, time.monotonic())
        self._flights.append(flight)
        with self._watched("launch", flight):
            return _WatchedStep(self, self._inner.launch(plan), flight)

    def collect(self, handle: StepHandle, flight: tuple[StepPlan, float]) -> StepOutput:
        """The output of a step that was launched."""
        with self._watched("collect", flight):
            output = handle.collect()
        self._end(flight)
        return output

    def log_record(self) -> None:
        """Writes down what is known of the steps in flight and of the last ones."""
        for line in self.record():
            logger.error("%s", line)

    def record(self) -> list[str]:
        """The same as lines."""
        now_s, call = time.monotonic(), self._call
        lines = [f"computed with {', '.join(self._features) or 'no kernels of its own'}"]
        if call is not None:
            half, step, since_s = call
            lines.append(f"the {half} of step {step} has taken {now_s - since_s:.1f} s")
        for plan, launched_s in list(self._flights):
            age_s, num_rows = now_s - launched_s, len(plan.rows)
            lines.append(f"step {plan.step} is in flight, launched {age_s:.1f} s ago: {num_rows} rows")
            lines += [f"  {_describe(row)}" for row in plan.rows[:_MOST_ROWS]]
            if num_rows > _MOST_ROWS:
                lines.append(f"  and {num_rows - _MOST_ROWS} more")
        lines += [f"before that, {done}" for done in reversed(self._done)]
        return lines

    @contextlib.contextmanager
    def _watched(self, half: str, flight: tuple[StepPlan, float]) -> Iterator[None]:
        self._call = (half, flight[0].step, time.monotonic())
        try:
            yield
        except Exception as error:
            self._end(flight, f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._call = None
                stalled = self._stalled
            if stalled:  # the watching thread is ending the process, and speaks for it
                threading.Event().wait()

    def _end(self, flight: tuple[StepPlan, float], failure: str = "") -> None:
        with contextlib.suppress(ValueError):
            self._flights.remove(flight)
        plan, launched_s = flight
        self._done.append(_Done(plan.step, len(plan.rows), time.monotonic() - launched_s, failure))

    def _watch(self) -> None:
        while True:
            call = self._look()
            if call is None:
                continue
            half, step, _ = call
            limit = f"{self._limit_s:g} s (--watchdog-timeout)"
            sentence = f"the {half} of step {step} did not end within {limit}: the device hangs"
            logger.error("%s", sentence)
            self.log_record()
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._on_stall(sentence)
            return

    def _look(self) -> tuple[str, int, float] | None:
        """The call that has taken too long, if there is one, after a pause."""
        pause_s = min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S)
        if self._owns_process:
            last_words.end_within(self._limit_s + pause_s + _GRACE_S)
        time.sleep(pause_s)
        with self._lock:
            call = self._call
            self._stalled = call is not None and time.monotonic() - call[2] > self._limit_s
            return call if self._stalled else None


class _WatchedStep:
    """A `StepHandle`."""

    def __init__(self, runner: WatchedRunner, inner: StepHandle, flight: tuple[StepPlan, float]) -> None:
        self._runner, self._inner, self._flight = runner, inner, flight

    def collect(self) -> StepOutput:
        """See `StepHandle`."""
        return self._runner.collect(self._inner, self._flight)


def _describe(row: PlannedRow) -> str:
    last = row.start + row.num_tokens - 1
    fed = "the token sampled last" if row.from_device else f"{row.num_tokens} tokens"
    wants = f", samples output {row.output_index}" if row.sample else ""
    masked = ", under a mask" if row.mask else ""
    return f"slot {row.slot}: {fed} at {row.start} to {last}{wants}{masked}, {len(row.new_pages)} new pages"
