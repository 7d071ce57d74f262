"""The runner on a GPU: the same tokens as on a CPU in float32, and every deployed layout runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from baleen_worker import runner
from baleen_worker.model_runner import ModelRunner
from baleen_worker.request import SamplingParams
from baleen_worker.sampler import SampleSpec, gumbel_noise, sample
from driver import Driver, Sequence, build, prompt
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baleen_worker.step import BuiltRunner

pytestmark = pytest.mark.gpu

MICRO = Path(__file__).parents[3] / "models" / "micro"
LENGTHS = (1, 64, 65, 200, 300)


@pytest.fixture(autouse=True)
def _free_the_device() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def requests(**params: object) -> list[Sequence]:
    sampling = SamplingParams(max_tokens=16, seed=3, logprobs=2, prompt_logprobs=0, **params)  # type: ignore[arg-type]
    return [Sequence(prompt(length, length, vocab_size=2048), sampling) for length in LENGTHS]


def run(built: BuiltRunner, **params: object) -> list[Sequence]:
    sequences = requests(**params)
    Driver(built, 0, max_chunk=100).run(sequences)
    assert [s.error for s in sequences] == [None] * len(sequences)
    return sequences


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("keep_fp8", [False, True])
def test_float32_equals_the_cpu(monkeypatch: pytest.MonkeyPatch, temperature: float, keep_fp8: bool) -> None:
    expected = run(build(MICRO), temperature=temperature)
    monkeypatch.setattr(runner, "_exceeds", lambda *_: keep_fp8)
    built = build(MICRO, device="cuda")
    assert (built.device, built.dtype) == ("cuda:0", "float32")
    found = run(built, temperature=temperature)
    for here, there in zip(found, expected, strict=True):
        assert here.output == there.output
        assert here.logprobs.logprobs == pytest.approx(there.logprobs.logprobs, abs=1e-3)
        assert here.prompt_logprobs.logprobs == pytest.approx(there.prompt_logprobs.logprobs, abs=1e-3)


def _questions(tokenizer: Tokenizer) -> list[Sequence]:
    """Facts in texts on both sides of the selection, and what they are asked for."""
    filler = "The river follows a small boat until the evening. Nobody counts the missing key with great care. "
    names = ("Kamiro", "Dosabe", "Lutani", "Reviko", "Pomase", "Tidalu")
    sequences = []
    for number, name in enumerate(names):
        before, after = filler * (1 + 4 * number), filler * (1 + 3 * (5 - number))
        text = f"{before}The code of {name} is {4821 + 313 * number}. {after}"
        question = f"<｜begin▁of▁sentence｜><｜User｜>{text}\n\nWhat is the code of {name}?<｜Assistant｜></think>"
        ids = tokenizer.encode(question, add_special_tokens=False).ids
        sequences.append(Sequence(ids, SamplingParams(max_tokens=12, seed=0, temperature=0.0)))
    return sequences


@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_fused_answers_are_those_of_the_cpu(kv_cache_dtype: str, disable_cuda_graph: bool) -> None:
    tokenizer = Tokenizer.from_file(str(MICRO / "tokenizer.json"))
    expected, found = _questions(tokenizer), _questions(tokenizer)
    Driver(build(MICRO, max_total_tokens=16_384), 0, max_chunk=300).run(expected)
    built = build(
        MICRO,
        device="cuda",
        dtype="auto",
        arithmetic="fused",
        kv_cache_dtype=kv_cache_dtype,
        max_total_tokens=16_384,
        disable_cuda_graph=disable_cuda_graph,
        cuda_graph_bs=(2, 6),
    )
    assert built.dtype == "bfloat16"
    assert "kernel:tile_hidden=triton" in built.features
    runner = built.runner
    assert isinstance(runner, ModelRunner)
    assert (runner.graphs is None) == disable_cuda_graph
    Driver(built, 0, max_chunk=300).run(found)
    answers = [(tokenizer.decode(a.output), tokenizer.decode(b.output)) for a, b in zip(found, expected, strict=True)]
    same = sum(here == there for here, there in answers)
    assert same >= len(answers) - 1, answers


def test_pools_fill_the_fraction_asked_for() -> None:
    free = torch.cuda.mem_get_info()[0]
    built = build(MICRO, device="cuda", dtype="auto", max_total_tokens=None, mem_fraction_static=0.2)
    assert 0.15 * free < built.kv_bytes < 0.2 * free


def test_noise_and_choices_equal_the_cpu() -> None:
    sampling = SamplingParams(max_tokens=1, seed=11, top_k=50, top_p=0.95)
    specs = [SampleSpec(sampling, index) for index in range(64)]
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    on_gpu = gumbel_noise(specs, 5000, torch.device("cuda")).cpu()
    assert torch.allclose(on_gpu, gumbel_noise(specs, 5000, torch.device("cpu")), rtol=1e-12)
    assert sample(logits.cuda(), specs).tolist() == sample(logits, specs).tolist()
