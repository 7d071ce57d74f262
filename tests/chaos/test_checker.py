"""The checker finds what it is for: each test breaks one rule in an otherwise sound ledger."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from baleen_worker.fake_runner import expected_tokens
from chaos.checker import EOS, judge
from chaos.crowd import VOCAB_SIZE
from chaos.run import Verdict, describe, told

PROMPT = [5, 6, 7]
TOKENS = expected_tokens(PROMPT, 4, VOCAB_SIZE, avoid_ids=(EOS,))
DONE = {"kind": "ended", "at": 2.0, "request": 1, "how": "done", "tokens": TOKENS, "finish_reason": "length"}
SOUND: list[dict[str, Any]] = [
    {"kind": "fault", "at": 0.0, "row": "reset", "seed": 1, "recover_s": 2, "may_fail": False, "may_cut": False},
    {"kind": "asked", "at": 1.0, "request": 1, "prompt": PROMPT, "max_tokens": 4},
    DONE,
    {"kind": "asked", "at": 2.0, "request": 2, "prompt": PROMPT, "max_tokens": 4},
    DONE | {"request": 2},
    {"kind": "healed", "at": 5.0},
    {"kind": "recovered", "at": 6.0},
    {"kind": "at rest", "at": 9.0, "held": {"baleen_active_requests": 0.0, "baleen_worker_used_kv_pages": 0.0}},
]


def ledger(first_end: dict[str, Any] | None = None, **head: Any) -> list[dict[str, Any]]:
    """A sound ledger whose first request ends otherwise."""
    records = copy.deepcopy(SOUND)
    records[0] |= head
    records[2] |= first_end or {}
    return records


def test_a_sound_ledger_has_no_problems() -> None:
    assert judge(ledger()) == []


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ({"tokens": TOKENS[:-1]}, "got 3 tokens, 4 were due"),
        ({"tokens": [*TOKENS, TOKENS[-1]]}, "got 5 tokens, 4 were due"),
        ({"tokens": [TOKENS[0], TOKENS[0], *TOKENS[2:]]}, "they part at 1"),
        ({"finish_reason": None}, "finished by None"),
        ({"how": "unfinished"}, "ended by 'unfinished'"),
        ({"how": "hung"}, "ended by 'hung'"),
        ({"how": "cut", "tokens": []}, "ended by 'cut'"),
        ({"how": "went on after done"}, "ended by 'went on after done'"),
        ({"how": "error", "tokens": [], "message": "lost"}, "failed where none may"),
        ({"how": "error", "tokens": [TOKENS[0] ^ 1], "message": "lost"}, "foreign tokens"),
    ],
)
def test_an_answer_that_is_not_what_was_due(end: dict[str, Any], problem: str) -> None:
    [found] = judge(ledger(end))
    assert found.startswith("request 1 ")
    assert problem in found


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ({"how": "error", "tokens": TOKENS[:2], "message": "the worker is gone"}, None),
        ({"how": "refused", "tokens": [], "status": 503, "message": "no worker"}, None),
        ({"how": "refused", "tokens": [], "status": 400, "message": "no"}, "tells a client not to try again"),
        ({"how": "error", "tokens": [], "message": ""}, "without a word"),
        ({"how": "cut", "tokens": []}, "ended by 'cut'"),
    ],
)
def test_a_failure_that_is_allowed_says_why(end: dict[str, Any], problem: str | None) -> None:
    found = judge(ledger(end, may_fail=True))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_only_a_dead_gateway_may_cut() -> None:
    assert judge(ledger({"how": "cut", "tokens": TOKENS[:1]}, may_fail=True, may_cut=True)) == []


def test_each_request_ends_once() -> None:
    records = ledger()
    assert judge([record for record in records if record is not records[2]]) == ["request 1 ended 0 times"]
    assert judge([*records, records[2]]) == ["request 1 ended 2 times"]
    assert judge([*records, DONE | {"request": 3}]) == ["request 3 ended and was never asked"]


def test_recovery_has_a_limit() -> None:
    assert judge(ledger(recover_s=0.5)) == ["took 1.0 s to recover, not 0.5"]
    assert judge(ledger(recover_s=0.5), slack=3.0) == []
    without = [record for record in ledger() if record["kind"] != "recovered"]
    assert judge(without) == ["healed 1 times and recovered 0 times"]


def test_nothing_is_held_at_rest() -> None:
    records = ledger()
    records[-1]["held"]["baleen_worker_used_kv_pages"] = 3.0
    assert judge(records) == ["at rest, baleen_worker_used_kv_pages is 3"]
    assert judge(records[:-1]) == ["nobody looked at the stack at rest"]


def test_a_fault_that_nobody_noticed_proves_nothing() -> None:
    counted = {"kind": "counted", "at": 8.0, "counter": "damaged_reads", "count": 0}
    assert judge([*ledger(), counted]) == ["no worker counted damaged_reads"]
    assert judge([*ledger(), counted | {"count": 2}]) == []
    [problem] = judge([*ledger(), {"kind": "astray", "at": 3.0, "message": "decode 3 never came to 'arrived'"}])
    assert problem == "the schedule went astray: decode 3 never came to 'arrived'"


@pytest.mark.parametrize("recovered_s", [0.0, 12.5, None])
def test_what_is_printed_of_a_verdict_can_be_read_again(recovered_s: float | None) -> None:
    sound, broken = (Verdict("kill-all", 7, problems, recovered_s, 120, 3) for problems in ([], ["late"]))
    assert told(describe(sound)) == sound
    first, *rest = describe(broken).splitlines()
    assert told(first) == Verdict("kill-all", 7, ["its ledger says more"], recovered_s, 120, 3)
    assert [told(line) for line in rest] == [None]


def test_nobody_waits_longer_than_a_silent_worker_takes_to_be_noticed() -> None:
    assert judge(ledger({"longest_wait_s": 99.0})) == [], "a row without a limit"
    records = ledger({"longest_wait_s": 13.5}, wait_s=13)
    records[4]["longest_wait_s"] = 12.5
    assert judge(records) == ["request 1 waited 13.5 s for a token, not 13"]
    assert judge(records, slack=1.1) == []
