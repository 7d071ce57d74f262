"""What constraints that ask too much of a compiler cost: the request that brings one, and everybody else.

200 hostile constraints (those of the tests: depth, breadth, recursion, bounds, nonsense) come one after another to an
engine whose other requests decode all the time. Each is compiled or refused by the trial in its process and, when that
was well, by the rank's threads beside the step loop. Told are the seconds from its arrival until it is admitted or
refused, and how much longer than without them a step of the others takes, in wall time: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
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
from report import ROOT, Bar, write

COUNT = 200
LIMIT_S = 1.0
DELAY_LIMIT_MS = 5.0
NEIGHBOURS = 8
PAUSE_S = 0.002  # between steps, when a GPU would compute
NEIGHBOUR, HOSTILE = 1, 2  # streams


class Lines:
    """Inbox and outbox: commands wait in a list; `ended` says how a hostile request went."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
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
                self.ended |= {key: error.message for key, error in columns.errors}
                self.ended |= dict.fromkeys(columns.keys, "")


class Rig:
    """An engine with neighbours that decode, and the time of each of its turns."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        self.lines = Lines()
        self.room = GrammarRoom(
            lambda: TriedCompiler(model, vocab_size, limit_s=LIMIT_S, num_threads=1), cache_bytes=256 << 20
        )
        runner, pages = FakeRunner(8192, vocab_size), PagePool(8192)
        scheduler = Scheduler(SchedulerLimits(NEIGHBOURS + 1, 512, 100), pages)
        self.engine = Engine(scheduler, runner, self.lines, self.lines, room=self.room)
        self.times_ms: list[float] = []
        sampling = SamplingParams(max_tokens=50_000, seed=0)
        self.lines.commands.append(Submit([Request((NEIGHBOUR, key), [5, key], sampling) for key in range(NEIGHBOURS)]))

    def turn(self) -> None:
        """One step, and the pause after it."""
        began_s = time.perf_counter()
        self.engine.turn()
        self.times_ms.append((time.perf_counter() - began_s) * 1000)
        time.sleep(PAUSE_S)

    def judge(self, key: int, kind: str, source: str) -> tuple[float, str]:
        """Seconds until a constraint is admitted or refused, and why it was refused."""
        sampling = SamplingParams(max_tokens=1, seed=key, stop_token_ids=(1,))
        self.lines.commands.append(
            Submit([Request((HOSTILE, key), [7], sampling, constraint=Constraint(kind, source))])
        )
        began_s = time.perf_counter()
        self.turn()
        while key not in self.lines.ended:
            self.turn()
        return time.perf_counter() - began_s, self.lines.ended[key]

    def quiet(self, turns: int) -> list[float]:
        """The times of turns in which nothing hostile happens."""
        self.times_ms.clear()
        for _ in range(turns):
            self.turn()
        return self.times_ms.copy()

    def close(self) -> None:
        """Ends the neighbours, and what compiles."""
        self.lines.commands.append(Abort([(NEIGHBOUR, key) for key in range(NEIGHBOURS)]))
        self.engine.turn()
        self.room.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/micro", help="folder with the vocabulary")
    arguments = parser.parse_args()
    vocab_size: int = json.loads((arguments.model / "config.json").read_text("utf-8"))["vocab_size"]
    rig = Rig(arguments.model, vocab_size)
    rig.judge(COUNT, "regex", "the first waits for the imports")
    quiet = rig.quiet(500)
    rig.times_ms.clear()
    judged = [
        (*rig.judge(key, kind, source), kind, source) for key, (kind, source) in enumerate(hostile_constraints(COUNT))
    ]
    busy = rig.times_ms
    rig.close()
    slowest = sorted(judged, reverse=True)[:5]
    delays = [ms - statistics.median(quiet) for ms in busy]
    write(
        f"hostile_constraints_{vocab_size}",
        {
            "vocab_size": vocab_size,
            "admitted": sum(not why for _, why, _, _ in judged),
            "refused": sum(bool(why) for _, why, _, _ in judged),
            "too_large": sum("too large" in why for _, why, _, _ in judged),
            "seconds_median": round(statistics.median(seconds for seconds, *_ in judged), 4),
            "slowest": [(round(s, 3), why[:60], kind, source[:60]) for s, why, kind, source in slowest],
            "step_ms_quiet": {"median": round(statistics.median(quiet), 3), "max": round(max(quiet), 3)},
            "step_ms_beside": {
                "steps": len(busy),
                "median": round(statistics.median(busy), 3),
                "p99": round(statistics.quantiles(busy, n=100)[98], 3),
                "max": round(max(busy), 3),
            },
        },
        [
            Bar("hostile constraint admitted or refused, slowest of 200", round(slowest[0][0], 3), LIMIT_S, "s"),
            Bar("longest delay of a neighbour's step", round(max(delays), 2), DELAY_LIMIT_MS, "ms"),
        ],
    )


if __name__ == "__main__":
    main()
