"""Runs faults against a living stack and judges what came of it.

    python -m chaos.run --seeds 2 --keep FOLDER        every row twice; what FOLDER already has is not run again
    python -m chaos.run --row kill-worker --first 7    one schedule again

A ledger a row and seed stays in FOLDER; `python -m chaos.checker LEDGER` gives its verdict again. Exit code 1
when a verdict is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from chaos.checker import judge
from chaos.crowd import Crowd, read_answer
from chaos.faults import ROWS, Fault
from chaos.ledger import Ledger, read
from chaos.stack import Stack

NUM_CLIENTS = 20
SETTLE_S = 1.0
RECOVERY_TIMEOUT_S = 60.0


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
    ledger.write("fault", row=row, seed=seed, recover_s=fault.recover_s, may_fail=fault.may_fail, may_cut=fault.may_cut)
    crowd = Crowd(stack.url, NUM_CLIENTS, seed, ledger)
    load = asyncio.create_task(crowd.run())
    await asyncio.sleep(SETTLE_S)
    await fault.strike(stack, random.Random(f"{row} {seed}"))
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


async def run(rows: Sequence[str], seeds: Sequence[int], folder: Path, slack: float = 1.0) -> list[Verdict]:
    """Every row with every seed that FOLDER has no ledger of; the verdicts of all."""
    missing = [(row, seed) for seed in seeds for row in rows if not _ledger(folder, row, seed).exists()]
    stack: Stack | None = None
    try:
        for row, seed in missing:
            roles = ROWS[row].roles
            if stack is not None and stack.roles != roles:
                unfit, stack = stack, None
                await unfit.__aexit__()
            stack = stack or await Stack(roles).__aenter__()
            path = _ledger(folder, row, seed)
            unfinished = path.with_suffix(".part")
            ledger = Ledger(unfinished)
            try:
                await strike(stack, row, seed, ledger)
            finally:
                ledger.close()
            unfinished.rename(path)
            verdict = verdict_of(row, seed, path, slack)
            print(describe(verdict), flush=True)
            if verdict.problems:  # what is broken is no ground for the next row
                broken, stack = stack, None
                await broken.__aexit__()
    finally:
        if stack is not None:
            await stack.__aexit__()
    return [verdict_of(row, seed, _ledger(folder, row, seed), slack) for row in rows for seed in seeds]


def _ledger(folder: Path, row: str, seed: int) -> Path:
    return folder / f"{row}-{seed}.jsonl"


def describe(verdict: Verdict) -> str:
    """A line, and one more for each of the first problems."""
    back = "never back" if verdict.recovered_s is None else f"back in {verdict.recovered_s:.1f} s"
    state = "BROKEN" if verdict.problems else "ok"
    counts = f"{verdict.num_asked} requests, {verdict.num_failed} failed"
    line = f"{state:6} {verdict.row} seed {verdict.seed}: {counts}, {back}"
    return "\n".join([line, *(f"         {problem}" for problem in verdict.problems[:5])])


def _rows(names: Sequence[str]) -> Iterator[str]:
    for name in names or ROWS:
        if name not in ROWS:
            raise SystemExit(f"error: there is no row {name!r}; there are: {', '.join(ROWS)}")
        yield name


def main() -> int:
    """Prints a verdict a row and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="a row, more than once for several")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds a row (default %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder of the ledgers (default: a temporary one)")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="baleen-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    verdicts = asyncio.run(run(list(_rows(options.row)), seeds, folder))
    bad = [verdict for verdict in verdicts if verdict.problems]
    print(f"{len(verdicts)} schedules, {len(bad)} broken, {time.monotonic() - began:.0f} s; ledgers in {folder}")
    for verdict in bad:
        print(describe(verdict))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
