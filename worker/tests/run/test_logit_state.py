"""Penalties, biases, minimum lengths and thinking budgets equal a slow reading of what they mean."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from baleen_worker.logit_state import LogitState
from baleen_worker.request import SamplingParams, ThinkingBudget
from baleen_worker.step import Admission, PlannedRow
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")
VOCAB = 70
OPEN, CLOSE = 3, 4


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, seed=0, **fields)


class Slots:
    """Requests stepped together against one state, as a runner would."""

    def __init__(self, requests: list[tuple[SamplingParams, list[int], list[int]]]) -> None:
        """Parameters, prompt and the outputs that an earlier stay in a slot has left."""
        self.state = LogitState(len(requests), VOCAB, CPU)
        self.requests = requests
        self.outputs = [list(output) for _, _, output in requests]
        for slot, (sampling, prompt, output) in enumerate(requests):
            history = (tuple(prompt + output), len(prompt)) if sampling.needs_history else ((), 0)
            self.state.admit(Admission(slot, sampling, *history))

    def rows(self, masks: dict[int, bytes] | None = None) -> list[PlannedRow]:
        """The rows that sample each request's next token; the first of a stay is the end of its prompt."""
        rows = []
        for slot, (_, prompt, earlier) in enumerate(self.requests):
            output = self.outputs[slot]
            known = prompt + output
            start = 0 if len(output) == len(earlier) else len(known) - 1
            mask = (masks or {}).get(slot, b"")
            rows.append(PlannedRow(slot, start, known[start:], 0, (), True, len(output), (), mask))
        return rows

    def follow(self, rows: list[PlannedRow]) -> None:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.token_ids))
        fed = torch.tensor([token for row in rows for token in row.token_ids])
        self.state.follow(rows, starts, fed)


def slow_change(logits: list[float], sampling: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    changed = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        x -= sampling.frequency_penalty * output.count(token)
        x -= sampling.presence_penalty * (token in output)
        changed.append(x + dict(sampling.logit_bias).get(token, 0.0))
    return changed


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
CHANGES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.0, 0.75]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-3.0, 2.5]), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
    }
)


@given(st.lists(st.tuples(CHANGES, TOKENS.filter(len), TOKENS), min_size=1, max_size=12), st.integers(0, 2**31))
def test_changes_equal_the_slow_reading(drawn: list[tuple[dict[str, Any], list[int], list[int]]], seed: int) -> None:
    g = random.Random(seed)
    slots = Slots([(params(**changes), prompt, output) for changes, prompt, output in drawn])
    for _ in range(4):
        rows = slots.rows()
        slots.follow(rows)
        if g.random() < 0.3:  # a step that is repeated, as after a failure beside it
            slots.follow(rows)
        logits = torch.tensor([[g.uniform(-4, 4) for _ in range(VOCAB)] for _ in rows])
        before = logits.clone()
        changed = slots.state.change(logits, rows)
        assert torch.equal(logits, before), "the given logits were written to"
        for slot, (sampling, prompt, _) in enumerate(slots.requests):
            expected = slow_change(logits[slot].tolist(), sampling, prompt, slots.outputs[slot])
            assert changed[slot].tolist() == pytest.approx(expected, abs=1e-5)
            if not sampling.penalizes and not sampling.logit_bias:
                assert torch.equal(changed[slot], before[slot]), "a neighbour's logits are not bitwise the same"
        for output in slots.outputs:
            output.append(g.randrange(VOCAB))


def test_nothing_asked_for_is_nothing_done() -> None:
    slots = Slots([(params(), [1], []), (params(min_tokens=0, stop_token_ids=(1,)), [2], [])])
    logits = torch.randn(2, VOCAB)
    rows = slots.rows()
    assert slots.state.change(logits, rows) is logits
    assert slots.state.forbid(logits, rows) is logits


def test_a_slot_forgets_its_former_request() -> None:
    state = LogitState(1, VOCAB, CPU)
    state.admit(Admission(0, params(presence_penalty=1.0), (5, 6, 7), 1))
    state.admit(Admission(0, params(presence_penalty=1.0), (5,), 1))
    row = PlannedRow(0, 0, (5,), 0, (), True, 0)
    assert state.change(torch.zeros(1, VOCAB), [row]).count_nonzero() == 0


def test_many_penalized_requests_come_and_go() -> None:
    state = LogitState(40, VOCAB, CPU)
    for turn in range(3):
        for slot in range(40):
            state.admit(Admission(slot, params(presence_penalty=1.0), (0, (slot + turn) % VOCAB), 1))
        rows = [PlannedRow(slot, 0, (0, 1), 0, (), True, 1) for slot in range(40)]
        changed = state.change(torch.zeros(40, VOCAB), rows)
        assert [row.nonzero().flatten().tolist() for row in changed] == [[(slot + turn) % VOCAB] for slot in range(40)]


def test_stop_tokens_wait_for_min_tokens() -> None:
    slots = Slots([(params(min_tokens=2, stop_token_ids=(1, 9)), [5], []), (params(stop_token_ids=(1,)), [5], [])])
    for index in range(4):
        rows = slots.rows()
        slots.follow(rows)
        forbidden = slots.state.forbid(torch.zeros(2, VOCAB), rows).isneginf()
        assert forbidden[0].nonzero().flatten().tolist() == ([1, 9] if index < 2 else [])
        assert not forbidden[1].any()
        for output in slots.outputs:
            output.append(0)


@given(st.lists(st.sets(st.integers(0, VOCAB - 1)), min_size=1, max_size=4))
def test_masks_forbid_what_they_leave_out(allowed: list[set[int]]) -> None:
    words = -(-VOCAB // 32)
    masks = {
        slot: sum(1 << token for token in tokens).to_bytes(words * 4, "little") for slot, tokens in enumerate(allowed)
    }
    slots = Slots([(params(), [1], []) for _ in range(len(allowed) + 1)])  # the last has none
    kept = ~slots.state.forbid(torch.zeros(len(allowed) + 1, VOCAB), slots.rows(masks)).isneginf()
    assert [set(row.nonzero().flatten().tolist()) for row in kept[:-1]] == allowed
    assert kept[-1].all()


def slow_reasoning(output: list[int], budget: ThinkingBudget) -> bool:
    """Whether the next token must close the reasoning."""
    is_open, used = budget.starts_open, 0
    for token in output:
        if token == budget.close_id:
            is_open = False
        elif is_open:
            used += 1
        elif token == budget.open_id:
            is_open = True
    return is_open and used >= budget.max_tokens


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.lists(st.sampled_from([OPEN, CLOSE, 5, 6]), max_size=8)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**31),
)
def test_a_spent_budget_closes_the_reasoning(drawn: list[tuple[int, bool, list[int]]], seed: int) -> None:
    g = random.Random(seed)
    budgets = [ThinkingBudget(count, OPEN, CLOSE, starts_open) for count, starts_open, _ in drawn]
    requests = [(params(thinking=budget), [1, OPEN], drawn[slot][2]) for slot, budget in enumerate(budgets)]
    slots = Slots([*requests, (params(), [1], [])])
    for _ in range(8):
        rows = slots.rows()
        slots.follow(rows)
        if g.random() < 0.3:
            slots.follow(rows)
        wish = [g.choice([OPEN, CLOSE, 5, 6, 6]) for _ in rows]
        forced = slots.state.force(torch.tensor(wish), rows).tolist()
        expected = [
            CLOSE if slow_reasoning(slots.outputs[slot], budget) else wish[slot] for slot, budget in enumerate(budgets)
        ]
        assert forced == [*expected, wish[-1]]
        for output, token in zip(slots.outputs, forced, strict=True):
            output.append(token)


def test_several_tokens_may_be_fed_at_once() -> None:
    sampling = params(frequency_penalty=1.0, thinking=ThinkingBudget(2, OPEN, CLOSE))
    state = LogitState(1, VOCAB, CPU)
    state.admit(Admission(0, sampling, (9,), 1))
    row = PlannedRow(0, 1, (OPEN, 7, 7), 1, (), True, 3)
    state.follow([row], [0, 3], torch.tensor([OPEN, 7, 7]))
    assert state.change(torch.zeros(1, VOCAB), [row])[0, [OPEN, 7]].tolist() == [-1.0, -2.0]
    assert state.force(torch.tensor([8]), [row]).tolist() == [CLOSE]
