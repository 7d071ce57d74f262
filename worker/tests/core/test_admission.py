"""Admission in bursts: what running requests are expected to add is summed once, and the sum is the right one."""

from __future__ import annotations

import random

import pytest
from baleen_worker.admission import Admission
from baleen_worker.growth import GrowthEstimate
from baleen_worker.sequence import Sequence
from engine_rig import Rig, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

BURST = 2048


def plain_sum(admission: Admission) -> int:
    """Tokens that those who run are expected to add, added up one by one."""
    growth = admission._growth
    return sum(growth.tokens(s.max_len - len(s.token_ids)) for s in admission._roster.running())


def test_a_burst_is_summed_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []
    plain = GrowthEstimate.total

    def count(growth: GrowthEstimate, remaining: object) -> int:
        sums.append(len(remaining))  # pyright: ignore[reportArgumentType] - an array
        return plain(growth, remaining)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(GrowthEstimate, "total", count)
    rig = Rig(num_pages=2 * BURST + 1, max_running=BURST, max_step_tokens=16 * BURST, max_queued=BURST)
    for key in range(BURST):
        rig.submit(make_request(key, [key % 97] * 9, 3))
    rig.step()
    assert rig.scheduler.load.running_requests == BURST
    assert len(sums) <= 2, "the requests that run are looked at anew for each that arrives"
    rig.finish()
    assert len(rig.ledger.accounts) == BURST


def test_the_running_sum_is_the_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0
    entered = Admission.entered

    def compare(admission: Admission, sequence: Sequence) -> None:
        nonlocal num_compared
        entered(admission, sequence)
        num_compared += 1
        residency = admission._residency
        assert admission.room() == residency.num_available - residency.pages_for(plain_sum(admission))

    monkeypatch.setattr(Admission, "entered", compare)

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 2**32), conservativeness=st.sampled_from([0.3, 1.0, 2.0]))
    def serve(seed: int, conservativeness: float) -> None:
        draw = random.Random(seed)
        rig = Rig(num_pages=draw.randint(20, 60), max_running=12, conservativeness=conservativeness)
        for key in range(40):
            prompt = [draw.randrange(90)] * draw.randint(1, 200)
            rig.submit(make_request(key, prompt, draw.randint(1, 200), priority=draw.randrange(3)))
            for _ in range(draw.randrange(4)):
                rig.step()
        rig.finish()

    serve()
    assert num_compared > 500
