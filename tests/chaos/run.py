"""Runs faults against a living stack and judges what came of it.

    python -m chaos.run --seeds 2 --keep FOLDER        every row twice; what FOLDER already has is not run again
    python -m chaos.run --row kill-worker --first 7    one schedule again
    python -m chaos.run --seeds 20 --jobs 4            four stacks beside each other, each in a process of its own
    python -m chaos.run --of-each-kind --seeds 2       what a pipeline plays

A ledger a row and seed stays in FOLDER; `python -m chaos.checker LEDGER` gives its verdict again. Exit code 1
when a verdict is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
from chaos.checker import judge
from chaos.crowd import Crowd, read_answer
from chaos.faults import OF_EACH_KIND, ROWS, Fault
from chaos.ledger import Ledger, read
from chaos.stack import Stack
from harness.processes import ROOT

NUM_CLIENTS = 20
SETTLE_S = 1.0
RECOVERY_TIMEOUT_S = 60.0


_TOLD = re.compile(
    r"(ok|BROKEN) +(\S+) seed (\d+): (\d+) requests, (\d+) failed, (?:back in (\d+(?:\.\d+)?) s|never back)$"
)

# A row and a seed.
Schedule = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a row with a seed."""

    row: str
    seed: int
    problems: list[str]
    recovered_s: float | None
    num_asked: int
    num_failed: int


async def strike(stack: Stack, row: str, seed: int, ledger: Ledger) -> None:
    """One fault under load, from the first request to a stack at rest."""
    fault: Fault = ROWS[row]
    limits = {"recover_s": fault.recover_s, "wait_s": fault.wait_s}
    ledger.write("fault", row=row, seed=seed, **limits, may_fail=fault.may_fail, may_cut=fault.may_cut)
    crowd = stack.crowd = Crowd(stack.url, NUM_CLIENTS, seed, ledger)
    load = asyncio.create_task(crowd.run())
    await asyncio.sleep(SETTLE_S)
    before = await stack.counted(fault.counts) if fault.counts else {}
    try:
        await fault.strike(stack, random.Random(f"{row} {seed}"))
    except (AssertionError, TimeoutError) as error:
        ledger.write("astray", message=str(error)[-4000:])
    ledger.write("healed")
    try:
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            await stack.all_ready(RECOVERY_TIMEOUT_S)
            while not await _is_answering(stack):
                await asyncio.sleep(0.05)
        ledger.write("recovered")
    except TimeoutError as error:
        ledger.write("not recovered", message=str(error)[-4000:])
    await asyncio.sleep(SETTLE_S)
    crowd.stop()
    await load
    if fault.counts:
        after = await stack.counted(fault.counts)
        ledger.write("counted", counter=fault.counts, count=sum(after.values()) - sum(before.values()))
    ledger.write("at rest", held=await stack.at_rest())


async def _is_answering(stack: Stack) -> bool:
    body = {"model": "micro", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=stack.url, timeout=10) as http:
        return (await read_answer(http, body))["how"] == "done"


def verdict_of(row: str, seed: int, path: Path, slack: float = 1.0) -> Verdict:
    """Judges a ledger; see `judge`."""
    records = read(path)
    times = {record["kind"]: record["at"] for record in records}
    recovered_s = times["recovered"] - times["healed"] if "recovered" in times else None
    ended = [record for record in records if record["kind"] == "ended"]
    num_failed = sum(record["how"] != "done" for record in ended)
    return Verdict(row, seed, judge(records, slack=slack), recovered_s, len(ended), num_failed)


class Stage:
    """A stack that goes from one schedule to the next; another one after a row that broke it or wants other roles.

    To be closed.
    """

    def __init__(self, folder: Path, slack: float = 1.0) -> None:
        self._folder, self._slack = folder, slack
        self._stack: Stack | None = None

    async def aclose(self) -> None:
        """Ends what runs."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.__aexit__()

    async def play(self, row: str, seed: int) -> Verdict:
        """One schedule, whose ledger stays in the folder."""
        stack = await self._stack_of(ROWS[row].roles)
        path = _ledger(self._folder, row, seed)
        unfinished = path.with_suffix(".part")
        ledger = Ledger(unfinished)
        try:
            await strike(stack, row, seed, ledger)
        finally:
            ledger.close()
        unfinished.rename(path)
        verdict = verdict_of(row, seed, path, self._slack)
        print(describe(verdict), flush=True)
        if verdict.problems:  # what is broken is no ground for the next row
            await self.aclose()
        return verdict

    async def _stack_of(self, roles: tuple[str, ...]) -> Stack:
        if self._stack is not None and self._stack.roles != roles:
            await self.aclose()
        if self._stack is None:
            self._stack = await Stack(roles).__aenter__()
        else:
            await self._stack.renew_gateway()
        return self._stack


async def run(schedules: Sequence[Schedule], folder: Path, slack: float = 1.0) -> list[Verdict]:
    """Every schedule that FOLDER has no ledger of; the verdicts of all."""
    async with aclosing(Stage(folder, slack)) as stage:
        for row, seed in missing(schedules, folder):
            await stage.play(row, seed)
    return verdicts_of(schedules, folder, slack)


def missing(schedules: Sequence[Schedule], folder: Path) -> list[Schedule]:
    """Those that FOLDER has no ledger of, with those of one kind of stack together."""
    found = [(row, seed) for row, seed in schedules if not _ledger(folder, row, seed).exists()]
    return sorted(found, key=lambda schedule: ROWS[schedule[0]].roles)


def verdicts_of(schedules: Sequence[Schedule], folder: Path, slack: float = 1.0) -> list[Verdict]:
    """What came of each."""
    return [verdict_of(row, seed, _ledger(folder, row, seed), slack) for row, seed in schedules]


async def run_beside(schedules: Sequence[Schedule], jobs: int, folder: Path, slack: float = 1.0) -> list[Verdict]:
    """The same in so many processes, each with a share of the schedules and stacks of its own."""
    left = missing(schedules, folder)
    with tempfile.TemporaryDirectory() as scratch:
        running: list[asyncio.subprocess.Process] = []
        for number in range(jobs):
            share = Path(scratch) / f"{number}.json"
            share.write_text(json.dumps(left[number::jobs]))
            command = [sys.executable, "-m", "chaos.run", "--keep", str(folder), "--schedules", str(share)]
            command += ["--slack", str(slack)]
            running.append(await asyncio.create_subprocess_exec(*command, env=_environment()))
        await asyncio.gather(*(process.wait() for process in running))
    lost = missing(schedules, folder)
    if lost:
        raise SystemExit(f"error: {len(lost)} schedules have not been run to their end: start this once more")
    return verdicts_of(schedules, folder, slack)


def _environment() -> dict[str, str]:
    """In which this module is found again."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "worker")])}


def _ledger(folder: Path, row: str, seed: int) -> Path:
    return folder / f"{row}-{seed}.jsonl"


def describe(verdict: Verdict) -> str:
    """A line, and one more for each of the first problems."""
    back = "never back" if verdict.recovered_s is None else f"back in {verdict.recovered_s:.1f} s"
    state = "BROKEN" if verdict.problems else "ok"
    counts = f"{verdict.num_asked} requests, {verdict.num_failed} failed"
    line = f"{state:6} {verdict.row} seed {verdict.seed}: {counts}, {back}"
    return "\n".join([line, *(f"         {problem}" for problem in verdict.problems[:5])])


def told(line: str) -> Verdict | None:
    """The verdict that `describe` wrote as this line, its problems left out but for one; None for other lines."""
    match = _TOLD.match(line)
    if match is None:
        return None
    state, row, seed, num_asked, num_failed, recovered_s = match.groups()
    problems = [] if state == "ok" else ["its ledger says more"]
    return Verdict(
        row, int(seed), problems, None if recovered_s is None else float(recovered_s), int(num_asked), int(num_failed)
    )


def _rows(names: Sequence[str]) -> Iterator[str]:
    for name in names or ROWS:
        if name not in ROWS:
            raise SystemExit(f"error: there is no row {name!r}; there are: {', '.join(ROWS)}")
        yield name


def main() -> int:
    """Prints a verdict a row and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="a row, more than once for several")
    parser.add_argument("--of-each-kind", action="store_true", help="only the rows that stand for every kind of fault")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds a row (default %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder of the ledgers (default: a temporary one)")
    parser.add_argument("--jobs", type=int, default=1, help="stacks beside each other (default %(default)s)")
    parser.add_argument("--slack", type=float, default=1.0, help="how many times a row's limits, on a busy machine")
    parser.add_argument("--schedules", type=Path, help="a JSON list of rows with seeds, in place of all these")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    names = OF_EACH_KIND if options.of_each_kind else options.row
    schedules: list[Schedule] = [(row, seed) for seed in seeds for row in _rows(names)]
    if options.schedules is not None:
        schedules = [(row, seed) for row, seed in json.loads(options.schedules.read_text("utf-8"))]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="baleen-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    slack: float = options.slack
    work = run_beside(schedules, options.jobs, folder, slack) if options.jobs > 1 else run(schedules, folder, slack)
    verdicts = asyncio.run(work)
    bad = [verdict for verdict in verdicts if verdict.problems]
    print(f"{len(verdicts)} schedules, {len(bad)} broken, {time.monotonic() - began:.0f} s; ledgers in {folder}")
    for verdict in bad:
        print(describe(verdict))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
