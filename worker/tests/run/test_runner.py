"""The runner's tokens equal a straightforward loop over an independent implementation, however steps are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_worker.request import SamplingParams, ThinkingBudget
from baleen_worker.step import Admission, BuiltRunner, PlannedRow, StepPlan
from driver import Driver, Sequence, build, prompt
from tiny_checkpoint import Tiny, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)


@pytest.fixture(scope="module", params=["tiny_v32", "tiny_v3"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def built(tiny: Tiny) -> BuiltRunner:
    return build(tiny.folder)


LENGTHS = (1, 23, 24, 25, 63, 64, 65, 130)


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[int, list[int]]:
    return {length: tiny.greedy(prompt(length, length), GREEDY.max_tokens) for length in LENGTHS}


@pytest.mark.parametrize("seed", range(6))
def test_greedy_tokens_equal_the_oracle(built: BuiltRunner, expected: dict[int, list[int]], seed: int) -> None:
    sequences = [Sequence(prompt(length, length), GREEDY) for length in LENGTHS]
    Driver(built, seed).run(sequences)
    assert {len(s.prompt): s.output for s in sequences} == expected


def test_whole_prompts_equal_the_oracle(built: BuiltRunner, expected: dict[int, list[int]]) -> None:
    sequences = [Sequence(prompt(length, length), GREEDY) for length in LENGTHS]
    Driver(built, 0, max_chunk=1000).run(sequences)
    assert {len(s.prompt): s.output for s in sequences} == expected


def test_logprobs_equal_the_oracle(built: BuiltRunner, tiny: Tiny) -> None:
    sampling = SamplingParams(max_tokens=5, seed=1, temperature=0.0, logprobs=3, prompt_logprobs=2)
    sequence = Sequence(prompt(90, 3), sampling)
    Driver(built, 3).run([sequence])
    expected = tiny.logits(sequence.prompt + sequence.output).log_softmax(-1)
    following = torch.tensor(sequence.prompt[1:] + sequence.output)
    chosen = expected[:-1].gather(1, following[:, None])[:, 0].tolist()
    assert sequence.prompt_logprobs.token_ids == sequence.prompt[1:]
    assert sequence.logprobs.token_ids == sequence.output
    assert sequence.prompt_logprobs.logprobs == pytest.approx(chosen[:89], abs=1e-4)
    assert sequence.logprobs.logprobs == pytest.approx(chosen[89:], abs=1e-4)
    for found, k, rows in ((sequence.prompt_logprobs, 2, expected[:89]), (sequence.logprobs, 3, expected[89:])):
        values, ids = rows.topk(k)
        count = len(found.token_ids)
        assert found.top_token_ids == ids[:count].tolist()
        assert found.top_logprobs == [pytest.approx(row, abs=1e-4) for row in values[:count].tolist()]


def test_sampled_tokens_do_not_depend_on_the_batch(built: BuiltRunner) -> None:
    def requests() -> list[Sequence]:
        return [
            Sequence(prompt(20 + 7 * n, n), SamplingParams(max_tokens=10, seed=n // 2, temperature=1.0 + 0.1 * n))
            for n in range(8)
        ]

    alone, together = requests(), requests()
    for number, sequence in enumerate(alone):
        Driver(built, number).run([sequence])
    Driver(built, 77).run(together)
    assert [s.output for s in alone] == [s.output for s in together]
    assert len({tuple(s.output) for s in alone}) == 8


def test_same_seed_same_tokens_alone_or_among_31_neighbours(tiny: Tiny) -> None:
    """Whatever the sampling asks for: everything that has a memory, and masks of nobody else."""
    built = build(tiny.folder, max_running_requests=32)
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4, "top_p": 0.9},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5, "top_k": 40},
        {"logit_bias": ((7, 3.0), (9, -100.0)), "min_tokens": 4, "stop_token_ids": (7,)},
        {"thinking": ThinkingBudget(3, open_id=11, close_id=12, starts_open=True)},
    ]

    def requests() -> list[Sequence]:
        return [
            Sequence(prompt(9 + 5 * n, n), SamplingParams(max_tokens=8, seed=n // 2, **kinds[n % len(kinds)]))
            for n in range(32)
        ]

    together = requests()
    Driver(built, 4, num_slots=32).run(together)
    for number in (0, 1, 2, 3, 4, 21, 31):
        alone = requests()[number]
        Driver(built, number).run([alone])
        assert alone.output == together[number].output, kinds[number % len(kinds)]
    assert all(12 in s.output[:4] for s in together[4::5]), "a budget was not kept"


def test_a_row_with_broken_logits_fails_alone(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path / "whole", "deepseek_v32")
    poison = 7
    with torch.no_grad():
        tiny.oracle.model.embed_tokens.weight[poison] = torch.nan
    tiny.oracle.save_pretrained(tmp_path / "broken")
    prompts = [[t for t in prompt(40, seed) if t != poison] for seed in range(3)]
    broken = Sequence([*prompts[0][:30], poison, *prompts[0][30:]], SamplingParams(max_tokens=3, seed=0, logprobs=1))
    scored = Sequence([poison, 1, 2], SamplingParams(max_tokens=0, seed=0, prompt_logprobs=1))
    built = build(tmp_path / "broken")
    healthy = [Sequence(ids, GREEDY) for ids in prompts]
    Driver(built, 5, max_chunk=1000).run([healthy[0], broken, healthy[1], healthy[2]])
    assert broken.error is not None
    assert "not finite" in broken.error
    assert (broken.output, broken.logprobs.token_ids) == ([], [])
    assert [s.output for s in healthy] == [tiny.greedy(ids, GREEDY.max_tokens) for ids in prompts]

    plan = StepPlan(0, [Admission(0, scored.sampling)], [PlannedRow(0, 0, scored.prompt, 0, [1], False, 0, [1, 2])])
    output = built.runner.launch(plan).collect()
    assert list(output.errors) == [0]
    assert output.prompt_logprobs == {}
    # The pages that the broken rows leave behind harm nobody.
    again = Sequence(prompts[1], GREEDY)
    driver = Driver(built, 6, max_chunk=1000)
    driver.free_pages = driver.free_pages[::-1]
    driver.run([again])
    assert again.output == tiny.greedy(prompts[1], GREEDY.max_tokens)


def test_a_repeated_row_gives_the_same(built: BuiltRunner) -> None:
    ids = prompt(70, 9)
    rows = [PlannedRow(2, 0, ids[:64], 0, [5], False, 0), PlannedRow(2, 64, ids[64:], 1, [9], True, 0)]
    outputs = []
    for row in (rows[0], rows[0], rows[1], rows[1], rows[0], rows[1]):
        plan = StepPlan(1, [Admission(2, GREEDY)], [row])
        outputs.append(built.runner.launch(plan).collect().token_ids[0])
    assert outputs[0] == outputs[1] == outputs[4] == []
    assert outputs[2] == outputs[3] == outputs[5] != []


def test_a_slot_forgets_its_last_request(built: BuiltRunner, expected: dict[int, list[int]]) -> None:
    driver = Driver(built, 1)
    driver.free_slots = [4]
    hot = Sequence(prompt(130, 1), SamplingParams(max_tokens=4, seed=3, temperature=5.0, top_k=3, logprobs=2))
    cold = Sequence(prompt(65, 65), GREEDY)
    driver.run([hot, cold])
    assert cold.output == expected[65]
    assert cold.logprobs.token_ids == []


def test_what_a_built_runner_says(tiny: Tiny) -> None:
    built = build(tiny.folder, max_total_tokens=1000)
    indexed = tiny.oracle.config.model_type == "deepseek_v32"
    assert (built.num_pages, built.device, built.dtype) == (1000 // 64 + 1, "cpu", "float32")
    bytes_per_token = 3 * 4 * (32 + 16 + (32 if indexed else 0))
    assert built.kv_bytes == built.num_pages * 64 * bytes_per_token
    assert built.weights_bytes == 4 * sum(p.numel() for p in tiny.oracle.state_dict().values())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "float32"])
def test_bfloat16_runs_and_stays_near(tiny: Tiny, kv_cache_dtype: str) -> None:
    built = build(tiny.folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    sequence = Sequence(prompt(20, 4), SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0))
    Driver(built, 2).run([sequence])
    expected = tiny.logits(sequence.prompt).log_softmax(-1)[:-1]
    exact = expected.gather(1, torch.tensor(sequence.prompt[1:])[:, None])[:, 0]
    error = (torch.tensor(sequence.prompt_logprobs.logprobs) - exact).abs()
    # A changed expert changes a row completely; most rows keep theirs. Foreign logits would be off by about two.
    assert error.median() < 0.6


def test_float32_refuses_rounded_keys(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16 does not go with --dtype float32"):
        build(tiny.folder, kv_cache_dtype="bfloat16")


def test_dummy_weights_need_no_files_and_follow_the_seed(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny.folder / "config.json").read_bytes())

    def tokens(seed: int) -> list[int]:
        built = build(tmp_path, load_format="dummy", seed=seed)
        sequence = Sequence(prompt(30, 0), SamplingParams(max_tokens=8, seed=0, temperature=0.0))
        Driver(built, 0).run([sequence])
        assert sequence.error is None
        return sequence.output

    assert tokens(1) == tokens(1) != tokens(2)
