"""Tokens chosen beside and behind decode graphs are the sampler's on the same logits, and nothing waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_worker.model_runner import ModelRunner
from baleen_worker.request import SamplingParams, ThinkingBudget
from baleen_worker.sampler import SampleSpec, sample
from baleen_worker.step import Admission, PlannedRow, StepPlan
from driver import Driver, Sequence, build, prompt

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from baleen_worker.step import BuiltRunner

pytestmark = pytest.mark.gpu

MICRO = Path(__file__).parents[3] / "models" / "micro"
VOCAB = 2048
RANDOM: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0},
    {"temperature": 2.0, "min_p": 0.1},
]
CHANGED: list[dict[str, Any]] = [
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": ((7, 3.0), (9, -100.0))},
    {"temperature": 0.0, "thinking": ThinkingBudget(3, open_id=11, close_id=12, starts_open=True)},
    {"temperature": 0.0},
    {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": (5,)},
]


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    options: dict[str, Any] = {"dtype": "auto", "arithmetic": "fused", "max_total_tokens": 16_384}
    return build(MICRO, device="cuda", cuda_graph_bs=(2, 6), mem_fraction_static=0.3, **options)


def sequences(kinds: list[dict[str, Any]]) -> list[Sequence]:
    return [
        Sequence(prompt(150 + 60 * number, number, VOCAB), SamplingParams(max_tokens=12, seed=50 + number, **kind))
        for number, kind in enumerate(kinds)
    ]


def runner_of(built: BuiltRunner) -> ModelRunner:
    assert isinstance(built.runner, ModelRunner)
    assert built.runner.graphs is not None
    return built.runner


def test_tokens_of_the_graph_are_the_sampler_s(built: BuiltRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = runner_of(built).graphs
    assert graphs is not None
    in_graph, num_checked = graphs.sample, 0

    def checked(specs: Rows[SampleSpec]) -> torch.Tensor:
        nonlocal num_checked
        found = in_graph(specs)
        logits = graphs._logits[: len(specs)].cpu()
        assert found.tolist() == sample(logits, specs).tolist()
        num_checked += len(specs)
        return found

    monkeypatch.setattr(graphs, "sample", checked)
    asked = sequences(RANDOM)
    Driver(built, 0, max_chunk=200).run(asked)
    assert [s.error for s in asked] == [None] * len(asked)
    assert num_checked > 20


def test_rows_that_change_their_logits_are_decoded_by_graphs_too(
    built: BuiltRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are what eager steps give; the last but one row is plain, and its neighbours change nothing for it."""
    runner = runner_of(built)
    with_graphs, eager = sequences(CHANGED), sequences(CHANGED)
    graphs = runner.graphs
    assert graphs is not None
    sizes: list[int] = []
    decode = graphs.decode
    monkeypatch.setattr(graphs, "decode", lambda rows: sizes.append(len(rows)) or decode(rows))
    Driver(built, 3, max_chunk=200).run(with_graphs)
    assert len(sizes) > 8
    monkeypatch.setattr(runner, "graphs", None)
    Driver(built, 3, max_chunk=200).run(eager)
    same = sum(a.output == b.output for a, b in zip(with_graphs, eager, strict=True))
    assert same >= len(CHANGED) - 1, "more than a near tie parts them"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch says once that it may miss some
@pytest.mark.parametrize("kinds", [[{"temperature": 0.0}] * 6, RANDOM, CHANGED], ids=["greedy", "random", "changed"])
def test_no_launch_waits_for_the_device(built: BuiltRunner, kinds: list[dict[str, Any]]) -> None:
    """A mask that a row has comes from the host, and is no reason to wait either."""
    runner = runner_of(built)
    params = [SamplingParams(max_tokens=40, seed=n, **kind) for n, kind in enumerate(kinds)]
    known = [prompt(20, n, VOCAB) for n in range(len(kinds))]
    admissions = [
        Admission(n, each, tuple(known[n]) if each.needs_history else (), len(known[n]) if each.needs_history else 0)
        for n, each in enumerate(params)
    ]
    rows = [PlannedRow(n, 0, known[n], 0, [1 + n], True, 0) for n in range(len(kinds))]
    runner.launch(StepPlan(0, admissions, rows)).collect()
    mask = bytes([0xFF] * (VOCAB // 8))
    for step in range(1, 9):
        planned = [
            PlannedRow(n, 19 + step, (), 1, (), True, step, from_device=True, mask=mask if n == 4 else b"")
            for n in range(len(kinds))
        ]
        if step > 2:  # all that is made once is made
            torch.cuda.set_sync_debug_mode("error")
        try:
            handle = runner.launch(StepPlan(step, [], planned))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not handle.collect().errors
