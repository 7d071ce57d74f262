"""What constraints that ask too much of a compiler cost: the request that brings one, and everybody else.

200 hostile constraints (those of the tests: depth, breadth, recursion, bounds, nonsense) come one after another to an
engine whose other requests decode all the time. Each is compiled or refused by the trial in its process and, when that
was well, by the rank's threads beside the step loop; what is admitted answers with a few tokens. Told are the seconds
from its arrival until it is admitted or refused, and how long steps take meanwhile, beside the same number of steps
without it right afterwards: what else the machine does delays both. All in wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "worker" / "tests" / "core"))

from baleen_worker.cache.pages import PagePool
from baleen_worker.engine import Engine
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.grammar.room import GrammarRoom, TriedCompiler
from baleen_worker.messages import Abort, Command, Event, StepDone, Submit
from baleen_worker.request import Constraint, Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from hostile_constraints import hostile_constraints
from report import ROOT, Bar, Plot, write

COUNT = 200
LIMIT_S = 1.0
DELAY_LIMIT_MS = 5.0
NEIGHBOURS = 8
HOSTILE_TOKENS = 4
PAUSE_S = 0.002  # between steps, when a GPU would compute
NEIGHBOUR, HOSTILE = 1, 2  # streams


class Lines:
    """Inbox and outbox: commands wait in a list; `begun` and `ended` tell of hostile requests."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.begun: set[int] = set()
        self.ended: dict[int, str] = {}

    def drain(self, *, wait: bool) -> list[Command]:
        """See `Inbox`."""
        commands, self.commands = self.commands, []
        return commands

    def publish(self, event: Event) -> None:
        """See `Outbox`."""
        assert isinstance(event, StepDone)
        for columns in event.streams:
            if columns.stream == HOSTILE:
                self.begun.update(columns.keys)
                self.ended |= {key: error.message for key, error in columns.errors}
                self.ended |= {
                    key: "" for key, reason in zip(columns.keys, columns.finish_reasons, strict=True) if reason
                }


@dataclass(frozen=True)
class Judged:
    """One constraint: seconds until it was admitted or refused, why it was refused, and the steps of the others."""

    seconds: float
    why: str
    kind: str
    source: str
    beside_ms: list[float]
    quiet_ms: list[float]


class Rig:
    """An engine with neighbours that decode."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self.lines = Lines()
        self.room = GrammarRoom(
            lambda: TriedCompiler(model, vocab_size, limit_s=LIMIT_S, num_threads=1), cache_bytes=256 << 20
        )
        runner, pages = FakeRunner(8192, vocab_size), PagePool(8192)
        scheduler = Scheduler(SchedulerLimits(NEIGHBOURS + 1, 512, 100), pages)
        self.engine = Engine(scheduler, runner, self.lines, self.lines, room=self.room)
        sampling = SamplingParams(max_tokens=50_000, seed=0)
        self.lines.commands.append(Submit([Request((NEIGHBOUR, key), [5, key], sampling) for key in range(NEIGHBOURS)]))

    def turn(self) -> float:
        """One step, whose milliseconds are returned, and the pause after it."""
        began_s = time.perf_counter()
        self.engine.turn()
        spent_ms = (time.perf_counter() - began_s) * 1000
        time.sleep(PAUSE_S)
        return spent_ms

    def judge(self, key: int, kind: str, source: str) -> Judged:
        """Brings one constraint, and then nothing for as many steps as it took."""
        sampling = SamplingParams(max_tokens=HOSTILE_TOKENS, seed=key, stop_token_ids=(1,))
        request = Request((HOSTILE, key), [7], sampling, constraint=Constraint(kind, source))
        self.lines.commands.append(Submit([request]))
        began_s, decided_s = time.perf_counter(), 0.0
        beside_ms: list[float] = []
        while key not in self.lines.ended:
            beside_ms.append(self.turn())
            if not decided_s and (key in self.lines.begun or key in self.lines.ended):
                decided_s = time.perf_counter()
        quiet_ms = [self.turn() for _ in beside_ms]
        return Judged(decided_s - began_s, self.lines.ended[key], kind, source, beside_ms, quiet_ms)

    def close(self) -> None:
        """Ends the neighbours, and what compiles."""
        self.lines.commands.append(Abort([(NEIGHBOUR, key) for key in range(NEIGHBOURS)]))
        self.engine.turn()
        self.room.close()


def step_times(times_ms: list[float]) -> dict[str, float]:
    """What is written down of so many steps."""
    cuts = statistics.quantiles(times_ms, n=1000)
    return {
        "steps": len(times_ms),
        "median": round(cuts[499], 3),
        "p99": round(cuts[989], 3),
        "p99.9": round(cuts[998], 3),
        "max": round(max(times_ms), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/micro", help="folder with the vocabulary")
    arguments = parser.parse_args()
    vocab_size: int = json.loads((arguments.model / "config.json").read_text("utf-8"))["vocab_size"]
    rig = Rig(arguments.model, vocab_size)
    rig.judge(COUNT, "regex", "the first waits for the imports")
    gc.collect()
    gc.freeze()  # as a rank does
    judged = [rig.judge(key, kind, source) for key, (kind, source) in enumerate(hostile_constraints(COUNT))]
    rig.close()
    slowest = sorted(judged, key=lambda each: each.seconds, reverse=True)
    beside_ms = sorted(ms for each in judged for ms in each.beside_ms)
    quiet_ms = sorted(ms for each in judged for ms in each.quiet_ms)
    write(
        f"hostile_constraints_{vocab_size}",
        {
            "vocab_size": vocab_size,
            "admitted": sum(not each.why for each in judged),
            "refused": sum(bool(each.why) for each in judged),
            "too_large": sum("too large" in each.why for each in judged),
            "seconds_median": round(statistics.median(each.seconds for each in judged), 4),
            "slowest": [(round(each.seconds, 3), each.why[:60], each.kind, each.source[:60]) for each in slowest[:5]],
            "step_ms_beside": step_times(beside_ms),
            "step_ms_quiet": step_times(quiet_ms),
        },
        [
            Bar("hostile constraint admitted or refused, slowest of 200", round(slowest[0].seconds, 3), LIMIT_S, "s"),
            Bar(
                "longest step beside them over the longest without", beside_ms[-1] - quiet_ms[-1], DELAY_LIMIT_MS, "ms"
            ),
        ],
        Plot(
            title=f"Seconds until a hostile constraint is admitted or refused, {vocab_size} tokens",
            x_label="constraints, the fastest first",
            y_label="s",
            series={
                name: [(place, each.seconds) for place, each in enumerate(slowest[::-1]) if bool(each.why) == refused]
                for name, refused in (("admitted", False), ("refused", True))
            },
            limit=LIMIT_S,
        ),
    )


if __name__ == "__main__":
    main()
