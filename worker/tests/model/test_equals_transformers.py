"""float32 logits, key picks and expert picks equal transformers', however the sequences are cut and mixed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
import transformers_model
from baleen_worker.model.attention_plan import AttentionForm
from cases import CASES, MIN_GAP, SPARSE, prepared, smallest_gap
from expectation import TOLERANCE, assert_same, from_trace
from product import build
from reference_model import ReferenceModel
from stepper import PAGE_SIZE, Schedule, Stepper, in_chunks, whole
from tiny_models import V3, V32, make_weights, random_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = pytest.mark.parametrize("name", list(CASES))


def _random_schedule(lengths: Sequence[int], prompts: Sequence[int], seed: int) -> Schedule:
    """Decodes first, then prompt pieces of random size, each step a random subset of the sequences."""
    rng = random.Random(seed)
    done = [0] * len(lengths)
    steps: list[list[tuple[int, int]]] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7]
        rows = [(i, 1) for i in active if done[i] >= prompts[i]]
        rows += [(i, rng.randint(1, prompts[i] - done[i])) for i in active if done[i] < prompts[i]]
        for i, count in rows:
            done[i] += count
        if rows:
            steps.append(rows)
    return steps


@pytest.mark.parametrize("name", SPARSE)
def test_no_selection_is_near_a_tie(name: str) -> None:
    case = prepared(name)
    assert min(smallest_gap(case.config, case.weights, ids) for ids in case.sequences) > MIN_GAP


@NAMES
def test_the_oracles_agree(name: str) -> None:
    case = prepared(name)
    reference = ReferenceModel(case.config, case.weights)
    for ids, expected in zip(case.sequences, case.expected, strict=True):
        assert_same(from_trace(reference.forward(ids)), expected)


@NAMES
@pytest.mark.parametrize("form", [AttentionForm.AUTO, AttentionForm.ABSORBED])
def test_whole_prompts(name: str, form: AttentionForm) -> None:
    case = prepared(name)
    model = build(case.config, case.weights, attention_form=form)
    for ids, expected in zip(case.sequences, case.expected, strict=True):
        assert_same(Stepper(model, [ids]).run(whole(len(ids)))[0], expected)


@NAMES
@pytest.mark.parametrize("form", [AttentionForm.AUTO, AttentionForm.ABSORBED])
def test_all_prompts_in_one_step(name: str, form: AttentionForm) -> None:
    case = prepared(name)
    model = build(case.config, case.weights, attention_form=form)
    lengths = [len(ids) for ids in case.sequences]
    for actual, expected in zip(Stepper(model, case.sequences).run(whole(*lengths)), case.expected, strict=True):
        assert_same(actual, expected)


@NAMES
def test_decode_equals_decode_of_transformers(name: str) -> None:
    case = prepared(name)
    ids, num_prefill = case.sequences[0], 40
    logits = transformers_model.decode(transformers_model.load(case.config, case.weights), ids, num_prefill)
    actual = Stepper(build(case.config, case.weights), [ids], [num_prefill]).run(in_chunks(len(ids), [num_prefill, 1]))
    torch.testing.assert_close(actual[0].logits, logits, atol=TOLERANCE, rtol=0)
    assert_same(actual[0], case.expected[0])


# Of sequence 3, which has 70 tokens: one by one, some, and around a page.
TELLING_SIZES = (1, 7, 32, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1)


@pytest.mark.parametrize("name", ["v32", "v32_other_shapes", "v3"])
@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize(
    "sizes", [pytest.param(TELLING_SIZES, id="telling"), pytest.param(range(1, 70), id="every", marks=pytest.mark.slow)]
)
def test_any_chunk_size(name: str, is_prompt: bool, sizes: Sequence[int]) -> None:
    case = prepared(name)
    ids, expected = case.sequences[3], case.expected[3]
    model = build(case.config, case.weights)
    for size in sizes:
        prompt_len = len(ids) if is_prompt else 0
        assert_same(Stepper(model, [ids], [prompt_len]).run(in_chunks(len(ids), [size]))[0], expected)


@NAMES
@pytest.mark.parametrize("form", [AttentionForm.AUTO, AttentionForm.ABSORBED])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_chunks_and_neighbours(name: str, form: AttentionForm, seed: int) -> None:
    case = prepared(name)
    lengths = [len(ids) for ids in case.sequences]
    prompts = [random.Random(seed).randint(1, length) for length in lengths]
    stepper = Stepper(build(case.config, case.weights, attention_form=form), case.sequences, prompts)
    for actual, expected in zip(stepper.run(_random_schedule(lengths, prompts, seed)), case.expected, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("name", ["v32_selects_all", "v3", "v3_without_query_latent", "v3_other_shapes"])
@pytest.mark.parametrize("sizes", [[90], [40, 1], [7, 30, 1, 1, 20]])
def test_expanded_form_of_any_row(name: str, sizes: list[int]) -> None:
    case = prepared(name)
    model = build(case.config, case.weights, attention_form=AttentionForm.EXPANDED)
    ids = case.sequences[0]
    assert_same(Stepper(model, [ids], [40]).run(in_chunks(len(ids), sizes))[0], case.expected[0])


def test_expanded_form_is_refused_where_keys_are_left_out() -> None:
    case = prepared("v32")
    model = build(case.config, case.weights, attention_form=AttentionForm.EXPANDED)
    with pytest.raises(ValueError, match="only 16 of 17 are to be selected"):
        Stepper(model, [case.sequences[2]]).run(whole(17))


@pytest.mark.parametrize("first", [14, 15, 16, 17, 18])
def test_expanded_prompts_leave_index_keys_for_later(first: int) -> None:
    """The short path scores nothing, yet tokens beyond the selection limit score the keys it wrote."""
    case = prepared("v32")
    ids = case.sequences[0]
    model = build(case.config, case.weights)
    assert_same(Stepper(model, [ids], [first]).run(in_chunks(len(ids), [first, 1]))[0], case.expected[0])
    assert_same(Stepper(model, [ids]).run(in_chunks(len(ids), [first, 3, 40]))[0], case.expected[0])


def test_work_is_cut_into_pieces_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bound on memory set so low that each loop runs several times."""
    for module in ("index_logits", "index_topk", "mha_dense", "mla_sparse"):
        monkeypatch.setattr(f"baleen_kernels.{module}._CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr("baleen_worker.model.indexer._CHUNK_SCORES", 700)
    monkeypatch.setattr("baleen_worker.model.attention_plan._MAX_BATCHED_KEYS", 130)
    case = prepared("v32")
    lengths = [len(ids) for ids in case.sequences]
    prompts = [40, 10, 17, 20, 1]
    model = build(case.config, case.weights)
    for schedule in (_random_schedule(lengths, prompts, 9), whole(*lengths)):
        for actual, expected in zip(Stepper(model, case.sequences, prompts).run(schedule), case.expected, strict=True):
            assert_same(actual, expected)


def test_many_decodes_in_one_step() -> None:
    case = prepared("v32")
    ids, count = case.sequences[0], 24
    lengths = [20 + 3 * i for i in range(count)]
    steps = [[(i, length - 2) for i, length in enumerate(lengths)]] + [[(i, 1) for i in range(count)]] * 2
    sequences = [ids[:length] for length in lengths]
    stepper = Stepper(build(case.config, case.weights), sequences, [length - 2 for length in lengths])
    for actual, length in zip(stepper.run(steps), lengths, strict=True):
        torch.testing.assert_close(actual.logits, case.expected[0].logits[:length], atol=TOLERANCE, rtol=0)
        for got, want in zip(actual.allowed, case.expected[0].allowed, strict=True):
            assert (got == want[:length, :length]).all()


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("sizes", [[80], [30, 7], [20, 1], [1]])
def test_ties_go_to_the_lower_position(num_heads: int, sizes: list[int]) -> None:
    """With few index heads, relu leaves many exact zeros, and most boundaries fall among them."""
    config = {**V32, "index_n_heads": num_heads, "index_topk": 24}
    weights, ids = make_weights(config, 11), random_ids(config, 80, 11)
    with transformers_model.lower_index_wins_ties():
        expected = transformers_model.prefill(transformers_model.load(config, weights), ids)
    assert smallest_gap(config, weights, ids) == 0
    assert_same(Stepper(build(config, weights), [ids], [60]).run(in_chunks(80, sizes))[0], expected)


def test_selecting_every_key_equals_the_dense_model() -> None:
    config = {**V32, "index_topk": 90}
    weights = make_weights(config, 12)
    dense = {name: tensor for name, tensor in weights.items() if ".indexer." not in name}
    ids = random_ids(config, 90, 12)
    sparse_run, dense_run = (
        Stepper(model, [ids], [50]).run(in_chunks(90, [30, 20, 1]))[0]
        for model in (build(config, weights), build(V3, dense))
    )
    assert torch.equal(sparse_run.logits, dense_run.logits)
