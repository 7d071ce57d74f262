"""The committed small checkpoint is what its script makes, has what it promises, and says varied things."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import Admission, PlannedRow, StepPlan
from tiny_checkpoint import read_config
from tokenizers import Tokenizer

MODELS = Path(__file__).parents[3] / "models"
MICRO = MODELS / "micro"
MIB = 1 << 20


@pytest.fixture(scope="module")
def make_micro() -> ModuleType:
    """The generator script as a module."""
    sys.path.insert(0, str(MODELS))
    spec = importlib.util.spec_from_file_location("make_micro", MODELS / "make_micro.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO / "tokenizer.json"))


def test_the_script_makes_the_same_bytes(make_micro: ModuleType, tmp_path: Path) -> None:
    make_micro.write(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in MICRO.iterdir() if path.name != "README.md"}
    assert made.keys() == committed.keys()
    assert [name for name, content in made.items() if content != committed[name]] == []


def test_it_is_small() -> None:
    sizes = [path.stat().st_size for path in MICRO.iterdir()]
    assert max(sizes) <= 15 * MIB
    assert sum(sizes) <= 20 * MIB


def test_control_tokens_are_flagged_as_released(tokenizer: Tokenizer) -> None:
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    begin_end = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    assert [tokenizer.token_to_id(text) for text in begin_end] == [0, 1, 2]
    assert all(special[text] for text in (*begin_end, "｜DSML｜"))
    plain = ("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")
    assert not any(special[text] for text in plain)


@pytest.mark.parametrize(
    "text", ["Hello there, 12345!", "  naïve 东京 タワー\n\n\tx = {'a': 1}", "\U0001f469‍\U0001f467", "</think>ok\r\n"]
)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < read_config(MICRO)["vocab_size"]


def test_numbers_split_by_three(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.encode("1234567", add_special_tokens=False).tokens
    assert all(len(piece) <= 3 for piece in pieces)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_generates_past_the_selection(dtype: str) -> None:
    config = WorkerConfig(model_dir=MICRO, dtype=dtype, device="cpu", max_total_tokens=2048, max_running_requests=2)
    built = build_runner(config)
    length = 300  # beyond index_topk, so that most keys are left out
    prompt = torch.randint(0, 2048, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    row = PlannedRow(0, 0, prompt, 0, list(range(1, 7)), True, 0)
    admissions, output = [Admission(0, SamplingParams(max_tokens=40, seed=0, temperature=0.0, logprobs=1))], []
    logprobs: list[float] = []
    for index in range(40):
        step = built.runner.launch(StepPlan(index, admissions, [row])).collect()
        assert step.errors == {}
        output += step.token_ids[0]
        logprobs += step.logprobs[0].logprobs
        admissions, row = [], PlannedRow(0, length + index, output[-1:], 6, (), True, index + 1)
    assert len(set(output)) > 20
    assert -9 < sum(logprobs) / len(logprobs) < -0.1
