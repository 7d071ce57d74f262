"""The worker's legs against those that the model check has explored, call by call, over recorded courses of calls.

`tests/handover_model` proves promises of a model; that its legs are the worker's own is shown here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from baleen_worker.transfer.actions import Action, Connect, ProtocolError, Send, Serve, Store, Timers
from baleen_worker.transfer.messages import (
    Ack,
    Chunk,
    Final,
    FromPrefill,
    Read,
    Refused,
    Released,
    Sealed,
    Stale,
    Wait,
    Want,
)
from baleen_worker.transfer.receiving import ReceivingLeg
from baleen_worker.transfer.sending import SendingLeg

COURSES = Path(__file__).resolve().parents[3] / "tests" / "handover_model" / "courses.jsonl"
TIMERS = Timers(progress_s=10.0, lease_s=30.0)
NUM_PAGES = 3
FINAL = Final(7, 0, NUM_PAGES)

Call = tuple[str, list[Any], Any]


def read_of(first: int, page: int, generation: int) -> Read:
    return Read(first, [page], [generation])


def message_of(spelled: list[Any]) -> FromPrefill:
    """What the model's prefill side says, in the worker's words."""
    match spelled:
        case ["wait"]:
            return Wait()
        case ["chunk", first, pages]:
            return Chunk(first, [page[0] for page in pages], [page[1] for page in pages], [page[2] for page in pages])
        case ["stale", first]:
            return Stale(first, 1)
        case ["final"]:
            return FINAL
        case ["released"]:
            return Released()
        case ["refused"]:
            return Refused("it may not")
        case _:
            raise AssertionError(f"the model says {spelled}")


def spelled(action: Action) -> list[Any]:
    """An action in the model's words."""
    match action:
        case Send(Chunk() as chunk):
            pages = zip(chunk.pages, chunk.generations, chunk.digests, strict=True)
            return ["chunk", chunk.first, [list(page) for page in pages]]
        case Send(Read(first=first, pages=[page], generations=[generation])):
            return ["read", first, page, generation]
        case Send(Sealed(first=first, generations=[generation])):
            return ["sealed", first, generation]
        case Send(Stale(first=first, count=1)):
            return ["stale", first]
        case Send(message):
            return [type(message).__name__.lower()]
        case Serve(Read(first=first, pages=[page], generations=[generation])):
            return ["serve", first, page, generation]
        case Store(first, 1):
            return ["store", first]
        case Connect():
            return ["connect"]
        case _:
            return [type(action).__name__.lower()]


def sending_course(calls: list[Call]) -> list[Any]:
    leg, now_s = SendingLeg(TIMERS), 0.0

    def make(call: str, arguments: list[Any]) -> list[Action]:
        match call, arguments:
            case "announce", [first, [page, generation, digest]]:
                return leg.announce(Chunk(first, [page], [generation], [digest]), now_s)
            case "withdraw", []:
                return leg.withdraw()
            case "finish", []:
                return leg.finish(FINAL, now_s)
            case "attach", []:
                return leg.attach(now_s)
            case "detach", []:
                leg.detach()
                return []
            case "read", [first, page, generation]:
                return leg.hear(read_of(first, page, generation), now_s)
            case "ack", []:
                return leg.hear(Ack(), now_s)
            case "want", []:
                return leg.hear(Want(b"r", 0), now_s)  # pyright: ignore[reportArgumentType]
            case "copied", [[first, page, generation], after]:
                return [Send(leg.copied(read_of(first, page, generation), [after], now_s))]
            case "lease ends", []:
                return leg.tick(now_s + TIMERS.lease_s + 1)
            case "cancel", []:
                return leg.cancel("it is over")
            case _:
                raise AssertionError(f"the model calls {call} with {arguments}")

    return [answer(make, call, arguments) for call, arguments, _ in calls]


def receiving_course(calls: list[Call]) -> list[Any]:
    leg = ReceivingLeg(
        (b"r", 0), TIMERS, num_pages=NUM_PAGES, num_scored=0, vocab_size=100, pages_per_read=1, now_s=0.0
    )

    def make(call: str, arguments: list[Any]) -> list[Action]:
        match call, arguments:
            case "start", []:
                return leg.start()
            case "connected", []:
                return leg.connected(0.0)
            case "reserve", []:
                return leg.reserve(0, 0.0)
            case "lost", []:
                return leg.lost("it is gone", 0.0)
            case "rejected", []:
                return leg.rejected("it is another")
            case "cancel", []:
                return leg.cancel()
            case "no progress", []:
                return leg.tick(TIMERS.progress_s + 1)
            case "received", [first, generation, digest]:
                return leg.received(Sealed(first, [generation]), [digest], 0.0)
            case "hear", message:
                return leg.hear(message_of(message), 0.0)
            case _:
                raise AssertionError(f"the model calls {call} with {arguments}")

    return [answer(make, call, arguments) for call, arguments, _ in calls]


def answer(make: Any, call: str, arguments: list[Any]) -> Any:
    try:
        return [spelled(action) for action in make(call, arguments)]
    except ProtocolError:
        return "protocol error"


def recorded() -> list[tuple[str, list[Call]]]:
    return [json.loads(line) for line in COURSES.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(("kind", "play"), [("sending", sending_course), ("receiving", receiving_course)])
def test_the_legs_do_what_the_models_legs_do(kind: str, play: Any) -> None:
    courses = [calls for leg, calls in recorded() if leg == kind]
    for number, calls in enumerate(courses):
        for step, (call, got) in enumerate(zip(calls, play(calls), strict=True)):
            assert got == call[2], f"{kind} course {number}, call {step}: {call[:2]}"


def test_the_courses_lead_everywhere() -> None:
    """Every call, and every action, a good many times."""
    calls = [call for _, calls in recorded() for call in calls]
    made = Counter(call for call, _, _ in calls)
    actions = Counter(name for _, _, actions in calls if actions != "protocol error" for name, *_ in actions)
    assert sum(actions == "protocol error" for _, _, actions in calls) >= 10
    wanted_calls = {
        *("announce", "withdraw", "finish", "attach", "detach", "read", "ack", "want", "copied", "lease ends"),
        *("cancel", "start", "connected", "reserve", "lost", "rejected", "no progress", "received", "hear"),
    }
    wanted_actions = {
        *("wait", "chunk", "sealed", "stale", "final", "released", "refused", "want", "ack", "read"),
        *("connect", "close", "serve", "store"),
        *("begun", "arrived", "failed", "stopped", "handedover", "leaseended"),
    }
    assert wanted_calls == {call for call, count in made.items() if count >= 2}, made
    assert wanted_actions == {name for name, count in actions.items() if count >= 2}, actions
    assert len(calls) > 2000
