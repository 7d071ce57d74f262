"""The runner on the fused model, on a CPU: bfloat16, FP8 weights, PyTorch backends; decode steps as graphs run them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_worker import model_runner
from baleen_worker.cache.storage import PagedPools
from baleen_worker.decode_graphs import padded_sizes, run_directly
from baleen_worker.model_runner import ModelRunner
from baleen_worker.request import SamplingParams, ThinkingBudget
from baleen_worker.step import Admission, PlannedRow, StepPlan
from driver import Driver, Sequence, build, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from baleen_worker.step import BuiltRunner, Runner, StepHandle

MICRO = Path(__file__).parents[3] / "models" / "micro"
GREEDY = SamplingParams(max_tokens=6, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    return build(MICRO, arithmetic="fused", dtype="bfloat16")


def _runner(built: BuiltRunner, **options: Any) -> ModelRunner:
    """Another runner on the same model, with pools of its own."""
    first = built.runner
    assert isinstance(first, ModelRunner)
    pools = PagedPools(first._pools.layout, built.num_pages, device=torch.device("cpu"), dtype=torch.bfloat16)
    sizes = {"max_running_requests": 6, "context_len": 1024, "page_size": 64}
    return ModelRunner(first._model, pools, **sizes, device=torch.device("cpu"), **options)


def _outputs(built: BuiltRunner, runner: ModelRunner, kinds: list[SamplingParams]) -> list[list[int]]:
    sequences = [
        Sequence(prompt(length, length, vocab_size=2048), kind)
        for length, kind in zip((3, 64, 254, 300), kinds, strict=True)
    ]
    driver = Driver(built, 1, max_chunk=200)
    driver.built = type("Built", (), {"runner": runner, "num_pages": built.num_pages})  # type: ignore[assignment]
    driver.run(sequences)
    assert [s.error for s in sequences] == [None] * 4
    return [s.output for s in sequences]


def test_it_says_what_it_computes_with(built: BuiltRunner) -> None:
    assert built.features[0] == "arithmetic:fused"
    assert "kernel:fp8_gemm=torch" in built.features
    assert built.dtype == "bfloat16"


SAME_BIAS = tuple((token, 60.0) for token in range(20, 26))
KINDS = [
    [GREEDY] * 4,
    [
        GREEDY,
        SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=6, seed=3, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=6, seed=5, temperature=0.0, repetition_penalty=1.3),
    ],
    [  # what a row is fed decides its next token
        SamplingParams(max_tokens=6, seed=0, temperature=0.0, thinking=ThinkingBudget(3, 11, 12, starts_open=True)),
        SamplingParams(max_tokens=6, seed=1, temperature=0.0, frequency_penalty=2.0, logit_bias=SAME_BIAS),
        SamplingParams(max_tokens=6, seed=2, temperature=0.5, presence_penalty=2.0, logit_bias=SAME_BIAS),
        GREEDY,
    ],
    [
        GREEDY,
        SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=6, seed=4, temperature=1.0, top_k=20, min_p=0.02),
        SamplingParams(max_tokens=6, seed=5, temperature=1.3),
    ],
]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=["greedy", "mixed", "history", "random"])
def test_padded_decode_steps_give_the_same_tokens(
    built: BuiltRunner, kinds: list[SamplingParams], prepared: bool
) -> None:
    """Contexts on both sides of the selection (256), so both variants run."""
    eager = _runner(built)
    padded = _runner(built, capture=run_directly, graph_sizes=(2, 5))
    assert padded.graphs is not None
    if prepared:
        padded.graphs.rehearse()  # leaves no trace
        padded.graphs.prepare()
    replayed: list[int] = []
    decode = padded.graphs.decode

    def counted(rows: Any) -> Any:
        replayed.append(len(rows))
        return decode(rows)

    padded.graphs.decode = counted
    assert _outputs(built, padded, kinds) == _outputs(built, eager, kinds)
    assert len(replayed) >= 4


def _tokens_from_the_device(runner: Runner, kinds: list[SamplingParams]) -> list[list[int]]:
    """Of steps whose rows are fed what the step before sampled, which the host has not seen."""
    known = [prompt(20 + 7 * n, n, vocab_size=2048) for n in range(len(kinds))]
    admissions = [Admission(n, kind, tuple(known[n]), len(known[n])) for n, kind in enumerate(kinds)]
    rows = [PlannedRow(n, 0, ids, 0, [1 + n], True, 0) for n, ids in enumerate(known)]
    plans = [StepPlan(0, admissions, rows)]
    for step in range(1, 6):
        rows = [
            PlannedRow(n, len(ids) + step - 1, (), 1, (), True, step, from_device=True) for n, ids in enumerate(known)
        ]
        plans.append(StepPlan(step, [], rows))
    outputs = [runner.launch(plan).collect() for plan in plans]
    assert not any(output.errors for output in outputs)
    return [[output.token_ids[n][0] for output in outputs] for n in range(len(kinds))]


@pytest.mark.parametrize("kinds", KINDS, ids=["greedy", "mixed", "history", "random"])
def test_a_graph_is_fed_what_was_sampled_beside_it(built: BuiltRunner, kinds: list[SamplingParams]) -> None:
    padded = _runner(built, capture=run_directly, graph_sizes=(2, 5))
    assert _tokens_from_the_device(padded, kinds) == _tokens_from_the_device(_runner(built), kinds)


def test_a_launch_that_raised_leaves_the_next_one_alone(built: BuiltRunner) -> None:
    """The step is launched again with the same rows, as the engine does."""
    launches: list[str] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            launches.append("raised" if len(launches) == 2 else "ran")
            if launches[-1] == "raised":
                raise RuntimeError("out of memory")
            step()

        return replay

    class Patient:
        """A runner that is asked once more."""

        def launch(self, plan: StepPlan) -> StepHandle:
            try:
                return runner.launch(plan)
            except RuntimeError:
                return runner.launch(plan)

    runner = _runner(built, capture=capture, graph_sizes=(4,))
    found = _tokens_from_the_device(Patient(), [GREEDY] * 4)
    assert found == _tokens_from_the_device(_runner(built), [GREEDY] * 4)
    assert launches.count("raised") == 1


def test_the_sink_takes_what_padding_writes(built: BuiltRunner) -> None:
    padded = _runner(built, capture=run_directly, graph_sizes=(4,))
    pools = padded._pools
    before = [pools.latent_store(layer)[64:].clone() for layer in range(3)]
    assert padded.graphs is not None
    padded.graphs.prepare()
    for layer, stored in enumerate(before):
        assert torch.equal(pools.latent_store(layer)[64:], stored)


def test_sizes_waste_little() -> None:
    sizes = padded_sizes(256)
    assert sizes[:8] == list(range(1, 9))
    assert sizes[-1] == 256
    assert all((larger - smaller - 1) / larger < 0.2 for smaller, larger in pairwise(sizes))
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(1000)[-1] == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_backends": (("mla_slots.decode", "flashmla_kv"),)}, "since the device is a CPU"),
        ({"uniform_routing": True}, "--uniform-routing makes answers meaningless"),
        ({"arithmetic": "fused"}, "--arithmetic fused cannot be honoured: --dtype is float32"),
        (
            {"arithmetic": "fused", "dtype": "bfloat16", "kernel_backends": (("fp8_gemm", "deep_gemm"),)},
            "it needs a Hopper GPU, and this is a CPU",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(MICRO, **options)


def test_models_without_fp8_weights_stay_plain(tiny_plain: Path) -> None:
    built = build(tiny_plain, dtype="bfloat16")
    assert built.features == ("arithmetic:plain",)
    with pytest.raises(ValueError, match="its weights are not block FP8"):
        build(tiny_plain, dtype="bfloat16", arithmetic="fused")


@pytest.fixture(scope="module")
def tiny_plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_checkpoint import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"), "deepseek_v32").folder


def test_whose_logits_stay_the_model_s() -> None:
    from baleen_worker.sampler import SampleSpec

    row = PlannedRow(0, 4, (1,), 1, (), True, 1)
    masked = PlannedRow(0, 4, (1,), 1, (), True, 1, mask=b"\xff")
    changed = [{"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.1}, {"min_tokens": 1}]
    assert model_runner._leaves_logits(row, SampleSpec(GREEDY, 0))
    assert model_runner._leaves_logits(row, SampleSpec(SamplingParams(max_tokens=1, seed=0, temperature=0.3), 0))
    assert not model_runner._leaves_logits(masked, SampleSpec(GREEDY, 0))
    for fields in changed:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, **fields)
        assert not model_runner._leaves_logits(row, SampleSpec(sampling, 0))
