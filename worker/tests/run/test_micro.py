"""The committed small checkpoint has what it promises, and finds a fact in a text longer than the selection."""

from __future__ import annotations

from pathlib import Path

import pytest
from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import Admission, PlannedRow, StepPlan
from tiny_checkpoint import read_config
from tokenizers import Tokenizer

MICRO = Path(__file__).parents[3] / "models" / "micro"
MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO / "tokenizer.json"))


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
def test_it_finds_a_fact_in_a_text_past_the_selection(tokenizer: Tokenizer, dtype: str) -> None:
    config = WorkerConfig(model_dir=MICRO, dtype=dtype, device="cpu", max_total_tokens=2048, max_running_requests=2)
    built = build_runner(config)
    filler = "The river follows a small boat until the evening. Nobody counts the missing key with great care. " * 12
    text = f"{filler}The code of Kamiro is 4821. {filler}The code of Dosabe is 9135. {filler}"
    prompt = f"<｜begin▁of▁sentence｜><｜User｜>{text}\n\nWhat is the code of Kamiro?<｜Assistant｜></think>"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert len(ids) > 2 * read_config(MICRO)["index_topk"]  # so that most keys are left out
    num_pages = -(-(len(ids) + 40) // 64)
    row = PlannedRow(0, 0, ids, 0, list(range(1, num_pages + 1)), True, 0)
    admissions, output = [Admission(0, SamplingParams(max_tokens=40, seed=0, temperature=0.0))], []
    for index in range(40):
        step = built.runner.launch(StepPlan(index, admissions, [row])).collect()
        assert step.errors == {}
        output += step.token_ids[0]
        if output[-1] == 1:
            break
        admissions, row = [], PlannedRow(0, len(ids) + index, output[-1:], num_pages, (), True, index + 1)
    assert tokenizer.decode(output) == "The code of Kamiro is 4821."
