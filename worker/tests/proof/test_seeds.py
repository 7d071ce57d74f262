"""A seed gives the same tokens alone and among 31 others, whatever happens to its computation meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams, ThinkingBudget
from baleen_worker.runner import build_runner
from baleen_worker.step import BuiltRunner
from circumstances import WHOLE, Circumstances
from model_rig import Service, serve
from tiny_checkpoint import write_checkpoint
from tiny_models import V32, make_weights

MICRO = Path(__file__).resolve().parents[3] / "models" / "micro"
CAPACITY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_running_requests": 40,
    "max_total_tokens": 64 * 300,
}
KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5, "top_k": 40},
    {"logit_bias": ((7, 3.0), (9, -100.0)), "min_tokens": 4, "stop_token_ids": (7,)},
    {"thinking": ThinkingBudget(3, open_id=11, close_id=12, starts_open=True)},
]
CROWDS = [
    Circumstances(chunk=64, prefix="hit", neighbours=31, displaced=True, depth=2),
    Circumstances(chunk=WHOLE, prefix="part", neighbours=31, depth=2),
    Circumstances(chunk=128, prefix="off", neighbours=31, displaced=True),
]


@pytest.fixture(scope="module", params=["random", "micro"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    folder = MICRO
    if request.param == "random":
        config = {**V32, "index_topk": 96}
        folder = write_checkpoint(tmp_path_factory.mktemp("seeds"), config, make_weights(config, seed=17))
    return build_runner(WorkerConfig(model_dir=folder, **CAPACITY))


def prompts() -> list[list[int]]:
    return [random.Random(number).choices(range(13, 200), k=90 + 5 * number) for number in range(len(KINDS))]


def sampling() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=8, seed=40 + number, temperature=1.0, **kind) for number, kind in enumerate(KINDS)
    ]


@pytest.fixture(scope="module")
def alone(built: BuiltRunner) -> list[list[int]]:
    answers, _ = serve(built, Circumstances(), prompts(), sampling())
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("how", CROWDS, ids=str)
def test_same_seed_same_tokens(built: BuiltRunner, alone: list[list[int]], how: Circumstances) -> None:
    answers, service = serve(built, how, prompts(), sampling())
    assert [answer.token_ids for answer in answers] == alone
    assert (service.scheduler.load.preemptions > 0) == how.displaced


@pytest.mark.parametrize("num_told", [1, 4, 7])
def test_a_later_attempt_goes_on_with_the_same_tokens(
    built: BuiltRunner, alone: list[list[int]], num_told: int
) -> None:
    """Noise, penalties, min_tokens and the thinking budget go on from what the earlier attempt has told."""
    service = Service(built, Circumstances(prefix="miss"))
    for prompt, each, tokens in zip(prompts(), sampling(), alone, strict=True):
        answer = service.ask(prompt, each, told=tokens[:num_told])
        assert answer.token_ids == tokens[num_told:]
    service.close()


def test_another_seed_gives_other_tokens(built: BuiltRunner, alone: list[list[int]]) -> None:
    """Else nothing was sampled above."""
    others = [SamplingParams(max_tokens=8, seed=900 + n, temperature=1.0, **kind) for n, kind in enumerate(KINDS)]
    answers, _ = serve(built, Circumstances(), prompts(), others)
    assert sum(answer.token_ids != tokens for answer, tokens in zip(answers, alone, strict=True)) >= 4
