"""Judges a ledger by the pass rule: nothing lost, doubled, foreign or leaked, and back in time.

    python -m chaos.checker LEDGER...

Every request ends exactly once. A whole answer is token by token the one that the fake runner must give; what came
before an error or a cut is a beginning of it. How a request may fail depends on the fault and stands in the ledger's
first record: with `may_fail` false none may, with it true only by a status or an error event that says why. Where a
worker falls silent, nobody waits longer for a token than it takes to notice and to go on elsewhere: `wait_s` there.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from baleen_worker.fake_runner import expected_tokens
from chaos.crowd import VOCAB_SIZE
from chaos.ledger import read

EOS = 1
# A gateway that is killed says nothing to anybody.
CLEAR_FAILURES = ("refused", "error")
RETRIABLE_STATUSES = (429, 500, 502, 503, 504)

Record = dict[str, Any]


def judge(records: list[Record], *, slack: float = 1.0) -> list[str]:
    """Every breach of the pass rule, a sentence each. Waits and recovery may be `slack` times as long."""
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    [head] = by_kind["fault"]
    return [
        *_judge_requests(head, by_kind.get("asked", []), by_kind.get("ended", [])),
        *_judge_waits((head.get("wait_s") or math.inf) * slack, by_kind.get("ended", [])),
        *_judge_recovery(head["recover_s"] * slack, by_kind.get("healed", []), by_kind.get("recovered", [])),
        *_judge_rest(by_kind.get("at rest", [])),
        *(f"the schedule went astray: {record['message']}" for record in by_kind.get("astray", [])),
        *(f"no worker counted {record['counter']}" for record in by_kind.get("counted", []) if record["count"] <= 0),
    ]


def _judge_requests(head: Record, asked: list[Record], ended: list[Record]) -> list[str]:
    problems: list[str] = []
    ends: dict[int, list[Record]] = {}
    for record in ended:
        ends.setdefault(record["request"], []).append(record)
    for request in asked:
        number = request["request"]
        found = ends.pop(number, [])
        if len(found) != 1:
            problems.append(f"request {number} ended {len(found)} times")
            continue
        problems += [f"request {number} {problem}" for problem in _judge_answer(head, request, found[0])]
    problems += [f"request {number} ended and was never asked" for number in ends]
    if not any(record["how"] == "done" for record in ended):
        problems.append("no request was answered at all")
    return problems


def _judge_answer(head: Record, request: Record, end: Record) -> list[str]:
    wanted = expected_tokens(request["prompt"], request["max_tokens"], VOCAB_SIZE, avoid_ids=(EOS,))
    tokens, how = end["tokens"], end["how"]
    if how == "done":
        if tokens != wanted:
            place = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), len(tokens))
            return [f"got {len(tokens)} tokens, {len(wanted)} were due, and they part at {place}"]
        return [] if end["finish_reason"] == "length" else [f"finished by {end['finish_reason']}"]
    if tokens != wanted[: len(tokens)]:
        return [f"got foreign tokens before it ended by {how!r}"]
    if how == "cut" and head.get("may_cut"):
        return []
    if how not in CLEAR_FAILURES:
        return [f"ended by {how!r}: {end.get('message', 'nothing was said')}"]
    if not head["may_fail"]:
        return [f"failed where none may: {how}, {end.get('status', '')} {end.get('message')}"]
    if how == "refused" and end["status"] not in RETRIABLE_STATUSES:
        return [f"was refused with {end['status']}, which tells a client not to try again: {end['message']}"]
    return [] if end.get("message") else [f"ended by {how!r} without a word"]


def _judge_waits(limit_s: float, ended: list[Record]) -> list[str]:
    waits = {record["request"]: record["longest_wait_s"] for record in ended} if math.isfinite(limit_s) else {}
    late = {number: wait_s for number, wait_s in waits.items() if wait_s > limit_s}
    return [f"request {number} waited {wait_s:.1f} s for a token, not {limit_s:g}" for number, wait_s in late.items()]


def _judge_recovery(limit_s: float, healed: list[Record], recovered: list[Record]) -> list[str]:
    if len(healed) != 1 or len(recovered) != 1:
        return [f"healed {len(healed)} times and recovered {len(recovered)} times"]
    seconds = recovered[0]["at"] - healed[0]["at"]
    return [f"took {seconds:.1f} s to recover, not {limit_s:g}"] if seconds > limit_s else []


def _judge_rest(looks: list[Record]) -> list[str]:
    if not looks:
        return ["nobody looked at the stack at rest"]
    return [f"at rest, {name} is {value:g}" for name, value in looks[-1]["held"].items() if value]


def main() -> int:
    """Prints a verdict a ledger; exit code 1 when one is broken."""
    broken = 0
    for name in sys.argv[1:]:
        problems = judge(read(Path(name)))
        print(f"{'ok' if not problems else 'BROKEN'} {name}")
        for problem in problems[:20]:
            print(f"  {problem}")
        broken += bool(problems)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
