"""The master test: an answer is the same whatever its computation had to share, wait for, or do again.

Tokens are equal to the last one and log-probabilities to rounding, because a wrong key among hundreds seldom changes
which token is likeliest. A random model is held against a plain reference that shares no code with the product, with
and without layers that reuse a selection (IndexCache); the trained micro model against its own plainest run. Prompts
end around the edges of pages and of the selection, and answers grow across them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from baleen_worker.config import HostCacheConfig, WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import BuiltRunner
from circumstances import FACTORS, Circumstances, covering, product
from model_rig import Answer, edges, serve
from product import model_config
from reference_model import ReferenceModel
from tiny_checkpoint import write_checkpoint
from tiny_models import V32, make_weights

TOPK = 96
LENGTHS = edges(64, TOPK)
MICRO = Path(__file__).resolve().parents[3] / "models" / "micro"
MICRO_TOPK = 256
MICRO_LENGTHS = edges(MICRO_TOPK)
MAX_TOKENS = 5
# F: a layer with a selection of its own, S: one that reuses the last one made.
PATTERNS = ("FFFF", "FSFS", "FSSS")
CAPACITY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_running_requests": 40,
    "max_total_tokens": 64 * 300,
    "host_cache": HostCacheConfig("write_back", ratio=1.0),
}


def prompt(length: int, vocab_size: int) -> list[int]:
    return random.Random(length).choices(range(3, vocab_size), k=length)


def greedy(count: int) -> list[SamplingParams]:
    """One for each subject; seeds tell subjects apart and choose nothing."""
    return [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, temperature=0.0, logprobs=0) for seed in range(count)]


class Judge(ABC):
    """A model folder and what it must answer."""

    def __init__(self, built: BuiltRunner, prompts: list[list[int]], tolerance: float) -> None:
        self.built, self.prompts, self.tolerance = built, prompts, tolerance

    def check(self, how: Circumstances, part: slice = slice(None)) -> None:
        """Serves all prompts, or part of them, and compares every answer."""
        prompts = self.prompts[part]
        answers, service = serve(self.built, how, prompts, greedy(len(prompts)))
        for ids, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == MAX_TOKENS
            tokens, logprobs = self.expect(ids, answer)
            assert answer.token_ids == tokens, f"{how}: other tokens after {len(ids)}"
            assert answer.logprobs == pytest.approx(logprobs, abs=self.tolerance), f"{how}: after {len(ids)}"
            whole_pages = (len(ids) - 1) // 64 * 64
            found = {"off": 0, "miss": 0, "part": len(ids) * 2 // 3 // 64 * 64}.get(how.prefix, whole_pages)
            assert answer.cached_tokens == found, "the circumstances are not what they say"
        load = service.scheduler.load
        if how.write_policy is not None:
            num_pages = sum((len(ids) - 1) // 64 for ids in prompts)
            assert load.host_fetched_pages >= num_pages * (1 + (MAX_TOKENS - 1) * how.displaced)
        preemptions = load.preemptions
        assert preemptions >= (MAX_TOKENS - 1) * len(prompts) if how.displaced else preemptions == 0

    @abstractmethod
    def expect(self, ids: list[int], answer: Answer) -> tuple[list[int], list[float]]:
        """The tokens and log-probabilities that should follow `ids`."""


class ReferenceJudge(Judge):
    """A random model, judged by the reference."""

    def __init__(self, folder: Path, pattern: str) -> None:
        config: dict[str, Any] = {**V32, "index_topk": TOPK, "num_hidden_layers": 4, "index_topk_pattern": pattern}
        owns = model_config(config).index_layers
        weights = {
            name: tensor
            for name, tensor in make_weights(config, seed=11).items()
            if ".indexer." not in name or owns[int(name.split(".")[2])]
        }
        write_checkpoint(folder, config, weights)
        built = build_runner(WorkerConfig(model_dir=folder, **CAPACITY))
        super().__init__(built, [prompt(length, config["vocab_size"]) for length in LENGTHS], tolerance=2e-4)
        self._reference = ReferenceModel(config, weights)

    @torch.inference_mode()
    def expect(self, ids: list[int], answer: Answer) -> tuple[list[int], list[float]]:
        """What the reference says after the prompt and after each of the answer's tokens."""
        logits = self._reference.forward(torch.tensor([*ids, *answer.token_ids[:-1]])).logits[len(ids) - 1 :]
        tokens = logits.argmax(-1)
        return tokens.tolist(), logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()


class MicroJudge(Judge):
    """The micro model, judged by the plainest run of its own."""

    def __init__(self) -> None:
        built = build_runner(WorkerConfig(model_dir=MICRO, **CAPACITY))
        super().__init__(built, [prompt(length, 1900) for length in MICRO_LENGTHS], tolerance=2e-4)
        plain, _ = serve(built, Circumstances(), self.prompts, greedy(len(self.prompts)))
        self._plain = {len(ids): answer for ids, answer in zip(self.prompts, plain, strict=True)}

    def expect(self, ids: list[int], answer: Answer) -> tuple[list[int], list[float]]:
        plain = self._plain[len(ids)]
        return plain.token_ids, plain.logprobs


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReferenceJudge:
    return ReferenceJudge(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def micro() -> MicroJudge:
    return MicroJudge()


def test_the_choice_covers_every_pair() -> None:
    chosen = covering()
    assert len(chosen) < len(product()) / 6
    for first, values in FACTORS.items():
        for second, others in FACTORS.items():
            pairs = {(getattr(how, first), getattr(how, second)) for how in chosen}
            assert first == second or pairs == {(a, b) for a in values for b in others}


def test_reusing_a_selection_changes_answers(tmp_path: Path) -> None:
    """Else the patterns would be one model under three names."""
    answers = []
    for pattern in ("FFFF", "FSSS"):
        judge = ReferenceJudge(tmp_path / pattern, pattern)
        served, _ = serve(judge.built, Circumstances(), judge.prompts, greedy(len(judge.prompts)))
        answers.append([logprob for answer in served for logprob in answer.logprobs])
    assert max(abs(a - b) for a, b in zip(*answers, strict=True)) > 1e-3


@pytest.mark.parametrize("tiny", PATTERNS, indirect=True)
def test_the_plainest_run_equals_the_reference(tiny: ReferenceJudge) -> None:
    tiny.check(Circumstances())


def some(pattern: str) -> list[Circumstances]:
    """The covering choice for the model as released, a third of it for those whose layers reuse selections."""
    return covering() if pattern == "FFFF" else covering()[PATTERNS.index(pattern) :: 3]


# Each with one prompt that ends at, before or behind the edge of a page, and one so near that of the selection.
CHOSEN = [
    pytest.param(pattern, how, slice(number % 3, None, 3), id=f"{pattern}-{how}")
    for pattern in PATTERNS
    for number, how in enumerate(some(pattern))
]


@pytest.mark.parametrize(("tiny", "how", "part"), CHOSEN, indirect=["tiny"])
def test_answers_of_a_random_model_are_the_reference_s(tiny: ReferenceJudge, how: Circumstances, part: slice) -> None:
    tiny.check(how, part)


@pytest.mark.parametrize("how", covering()[1:5], ids=str)
def test_answers_of_the_micro_model_never_change(micro: MicroJudge, how: Circumstances) -> None:
    micro.check(how)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", PATTERNS, indirect=True)
@pytest.mark.parametrize("how", product(), ids=str)
def test_answers_of_a_random_model_under_all_circumstances(tiny: ReferenceJudge, how: Circumstances) -> None:
    tiny.check(how)


@pytest.mark.slow
@pytest.mark.parametrize("how", product(), ids=str)
def test_answers_of_the_micro_model_under_all_circumstances(micro: MicroJudge, how: Circumstances) -> None:
    micro.check(how)
