"""Runs the test suites and ends with a table of what ran, which tests failed and what was skipped.

    python tests/run.py [--all] [SUITE ...]

`--all` adds the tests marked slow. Suites: rust, worker, kernels, models, eval, packaging, bench, e2e, chaos; all
unless some are named. Two more run where they are named, on a CUDA device: gpu-kernels, gpu-worker.
Those that mostly wait run beside those that compute, each lot one after another; every line says whose it is.
Needs nothing beyond what `make setup` installs; the exit code is 0 only when every suite ran tests and none failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITES = {
    "rust": [],
    "worker": ["worker/tests"],
    "kernels": ["kernels/tests"],
    "models": ["models/tests"],
    "eval": ["eval/tests"],
    "packaging": ["tests/packaging"],
    "bench": ["tests/bench"],
    "e2e": ["tests/e2e"],
    "chaos": ["tests/chaos"],
}
# Mostly wait: for processes to start, to answer and to be missed.
WAITING = ("e2e", "chaos")
# Run where they are named alone; several processes may share the device where none asks how much memory it has.
GPU_SUITES = {
    "gpu-kernels": ["kernels/tests"],
    "gpu-worker": ["worker/tests/run", "worker/tests/proof/test_gpu_invariance.py"],
}
GPU_WORKERS = {"gpu-kernels": 6, "gpu-worker": 1}
CARGO_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
CARGO_FAILURE = re.compile(r"^test (\S+) .*\.\.\. FAILED$")
# Of what a failed test said, as much as fits beside its name.
REASON_CHARACTERS = 160


@dataclass
class Outcome:
    """Counts of one suite. `failures` names the failed tests; `skips` maps a reason to how many were skipped for it."""

    suite: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    exit_code: int = 0
    failures: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.failed == 0 and self.passed > 0


def run_cargo(*, slow: bool) -> Outcome:
    """Runs the Rust tests over the libraries that the gateway itself was built with.

    Its own code is optimised a little, which takes less time than all of it and spares simulations minutes, and checks
    more: sums that overflow panic. `slow` tests it as it is served, gives some tests more to do, and adds those of the
    feature `kubernetes`, whose libraries take minutes to compile.
    """
    profile = os.environ.get("BALEEN_CARGO_PROFILE", "ci")
    command = ["cargo", "test", "--locked", "--workspace", "--profile", profile]
    if slow:
        command += ["--features", "baleen-gateway/kubernetes"]
    else:
        for setting in ("opt-level=1", "debug-assertions=true", "overflow-checks=true"):
            command += ["--config", f"profile.{profile}.package.baleen-gateway.{setting}"]
    outcome = Outcome("rust")

    def count(line: str) -> None:
        match = CARGO_RESULT.match(line)
        if match:
            outcome.passed += int(match[1])
            outcome.failed += int(match[2])
            if int(match[3]):
                outcome.skips["ignored"] += int(match[3])
        if failure := CARGO_FAILURE.match(line):
            outcome.failures.append(failure[1])

    run_command(outcome, command, {"BALEEN_TEST_ALL": "1"} if slow else {}, count)
    return outcome


def run_pytest(suite: str, *, slow: bool) -> Outcome:
    """Runs one Python suite; counts come from pytest's own report."""
    on_gpu = suite in GPU_SUITES
    workers = min(os.cpu_count() or 1, GPU_WORKERS.get(suite, 8))
    marks = [*(["gpu"] if on_gpu else []), *([] if slow else ["not slow"])]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *(SUITES | GPU_SUITES)[suite]]
        if marks:
            command += ["-m", " and ".join(marks)]
        if workers > 1:
            command += ["-n", str(workers), "--dist", "worksteal" if on_gpu else "loadfile"]
        outcome = Outcome(suite)
        run_command(outcome, command, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
        if report.exists():
            count_cases(report, outcome)
    return outcome


def run_command(
    outcome: Outcome, command: list[str], environment: dict[str, str], look: Callable[[str], None] = lambda _: None
) -> None:
    """Runs one suite's command, shows `look` and the user each line, and notes the time and the exit code."""
    # Hundreds of processes import the same modules: what one of them compiles is kept, whatever the user's shell says.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            look(line)
            sys.stdout.write(f"{outcome.suite:9} | {line}")
            sys.stdout.flush()
    outcome.exit_code = process.returncode
    outcome.seconds = time.monotonic() - started


def run_suites(suites: Sequence[str], *, slow: bool) -> list[Outcome]:
    """Runs those that wait beside the others, and returns all outcomes in the order of `suites`."""
    outcomes: dict[str, Outcome] = {}

    def run_lot(lot: list[str]) -> None:
        for suite in lot:
            outcomes[suite] = run_cargo(slow=slow) if suite == "rust" else run_pytest(suite, slow=slow)

    lots = [[suite for suite in suites if (suite in WAITING) is waits] for waits in (False, True)]
    with ThreadPoolExecutor(len(lots)) as pool:
        list(pool.map(run_lot, lots))
    return [outcomes[suite] for suite in suites]


def count_cases(report: Path, outcome: Outcome) -> None:
    """Adds the test cases of a JUnit report to `outcome`."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        failure = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if failure is not None:
            outcome.failed += 1
            reason = " ".join(failure.get("message", "no reason given").split())[:REASON_CHARACTERS]
            outcome.failures.append(f"{case.get('classname')}::{case.get('name')}: {reason}")
        elif skipped is not None:
            outcome.skips[skipped.get("message", "no reason given")] += 1
        else:
            outcome.passed += 1


def print_summary(outcomes: list[Outcome], *, slow: bool) -> None:
    """Prints the table, then failed tests by name, then the reasons of skipped ones, then what was left out."""
    print(f"\n{'suite':10} {'result':7} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for outcome in outcomes:
        result = "ok" if outcome.ok else "FAILED"
        counts = f"{outcome.passed:7} {outcome.failed:7} {outcome.skips.total():8}"
        print(f"{outcome.suite:10} {result:7} {counts} {outcome.seconds:8.0f}")
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"failed in {outcome.suite}: {failure}")
    for outcome in outcomes:
        for reason, count in outcome.skips.most_common():
            print(f"skipped in {outcome.suite}: {count} × {reason}")
        if outcome.passed == 0 and outcome.failed == 0:
            print(f"{outcome.suite} ran no test")
    if not slow:
        print("left out: tests marked slow (`make test-all` runs them)")


def main() -> int:
    """Runs the suites named on the command line."""
    parser = argparse.ArgumentParser(description="Run Baleen's tests.")
    parser.add_argument("--all", action="store_true", help="also run the tests marked slow")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of: {', '.join(SUITES | GPU_SUITES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - (SUITES | GPU_SUITES).keys()
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    outcomes = run_suites(list(dict.fromkeys(arguments.suites)) or list(SUITES), slow=arguments.all)
    print_summary(outcomes, slow=arguments.all)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
