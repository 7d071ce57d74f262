"""The sampler equals a slow reading of its contract, token by token, and draws from the distribution it describes."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from baleen_worker.request import SamplingParams
from baleen_worker.sampler import SampleSpec, gumbel_noise, likeliest, logprobs_of, sample
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def spec(output_index: int = 0, seed: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, seed=seed, **params), output_index)


def splitmix(state: int) -> int:
    """The finaliser, from the paper's listing."""
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def slow_noise(seed: int, output_index: int, token_id: int) -> float:
    key = splitmix(seed + (output_index + 1) * GOLDEN)
    u = ((splitmix(key + (token_id + 1) * GOLDEN) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(min(u, 1 - 2**-53)))


def slow_kept(logits: list[float], sampling: SamplingParams) -> dict[int, float]:
    """Tokens that may be chosen, with their probability times a constant."""
    top = max(logits)
    weights = {v: math.exp((x - top) / sampling.temperature) for v, x in enumerate(logits)}
    order = sorted(weights, key=lambda v: (-logits[v], v))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total, mass, kept = sum(weights[v] for v in order), 0.0, []
    for v in order:
        if kept and sampling.top_p < 1 and mass / total >= sampling.top_p:
            break
        kept.append(v)
        mass += weights[v]
    return {v: weights[v] for v in kept if weights[v] >= sampling.min_p}


def slow_sample(logits: list[float], s: SampleSpec) -> int:
    if s.sampling.temperature == 0:
        return max(range(len(logits)), key=lambda v: (logits[v], -v))
    kept = slow_kept(logits, s.sampling)
    noisy = {v: math.log(w) + slow_noise(s.sampling.seed, s.output_index, v) for v, w in kept.items() if w > 0}
    return max(noisy, key=lambda v: noisy[v])


PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 5, 1000]),
        "top_p": st.sampled_from([0.0, 0.05, 0.35, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.6, 1.0]),
    }
)


@given(st.lists(st.tuples(PARAMS, st.integers(0, 5000)), min_size=1, max_size=6), st.integers(0, 2**31))
def test_equals_the_slow_reading(rows: list[tuple[dict[str, Any], int]], seed: int) -> None:
    # Eighths, so that equal logits are common and sums of few probabilities are far from the bounds.
    g = random.Random(seed)
    logits = [[g.randint(-24, 24) / 8 for _ in range(40)] for _ in rows]
    specs = [spec(index, **params) for params, index in rows]
    expected = [slow_sample(row, s) for row, s in zip(logits, specs, strict=True)]
    assert sample(torch.tensor(logits), specs).tolist() == expected


def test_noise_is_the_documented_one() -> None:
    specs = [spec(index, seed) for index, seed in itertools.product((0, 1, 10**6), (0, 1, 2**63, MASK))]
    noise = gumbel_noise(specs, 50, CPU)
    for row, s in zip(noise.tolist(), specs, strict=True):
        assert row == pytest.approx([slow_noise(s.sampling.seed, s.output_index, v) for v in range(50)], rel=1e-12)


def test_first_noise_values_stay_what_they_are() -> None:
    """Seeded answers survive upgrades: these values are part of the contract."""
    noise = gumbel_noise([spec(0, 0), spec(3, 1234567890123)], 3, CPU).tolist()
    expected = [[slow_noise(0, 0, v) for v in range(3)], [slow_noise(1234567890123, 3, v) for v in range(3)]]
    assert noise == [pytest.approx(row, rel=1e-12) for row in expected]
    # From the published test vector of SplitMix64: seed 1234567 gives 6457827717110365317 first.
    assert splitmix(1234567 + GOLDEN) == 6457827717110365317


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8, "min_p": 0.2}],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = [1.0, -0.5, 2.0, 0.3, -3.0, 1.7]
    draws = 20_000
    specs = [spec(index, seed=7, **params) for index in range(draws)]
    counts = sample(torch.tensor(logits).expand(draws, -1).contiguous(), specs).bincount(minlength=6).tolist()
    kept = slow_kept(logits, specs[0].sampling)
    total = sum(kept.values())
    for v, count in enumerate(counts):
        p = kept.get(v, 0.0) / total
        # Six standard deviations.
        assert abs(count - draws * p) <= 6 * math.sqrt(draws * p * (1 - p)), v


def test_seeds_and_outputs_are_independent() -> None:
    logits = torch.zeros(4000, 2)
    by_seed = sample(logits, [spec(0, seed) for seed in range(4000)])
    by_output = sample(logits, [spec(index, 0) for index in range(4000)])
    for bits in (by_seed, by_output, by_seed ^ by_output, by_output[1:] ^ by_output[:-1]):
        assert abs(bits.float().mean().item() - 0.5) < 0.05


def test_neighbours_do_not_matter() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 200, generator=g)
    cycle = itertools.cycle([{}, {"top_k": 7}, {"temperature": 0.0}, {"top_p": 0.7}, {"min_p": 0.1}])
    specs = [spec(n, seed=n % 5, **next(cycle)) for n in range(30)]
    together = sample(logits, specs).tolist()
    assert together == [int(sample(logits[n : n + 1], specs[n : n + 1])) for n in range(30)]
    order = torch.randperm(30, generator=g).tolist()
    assert sample(logits[order], [specs[n] for n in order]).tolist() == [together[n] for n in order]


def test_large_batches_are_sampled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from baleen_worker import sampler

    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    specs = [spec(n, top_k=n) for n in range(9)]
    whole = sample(logits, specs).tolist()
    monkeypatch.setattr(sampler, "_MAX_ELEMENTS", 100)
    assert sample(logits, specs).tolist() == whole


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.full((3, 5000), -1.0)
    logits[0, [4999, 17, 3000]] = 2.0
    logits[1, :] = 0.0
    logits[1, 100] = -0.0
    logits[2, [1, 2]] = torch.tensor([-0.0, 0.0])
    greedy = [spec(temperature=0.0)] * 3
    assert sample(logits, greedy).tolist() == [17, 0, 1]
    assert sample(logits, [spec(top_k=1)] * 3).tolist() == [17, 0, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[80.0, -90.0, 80.0, 3e38]])
    token_id = int(sample(logits, [spec(temperature=temperature, top_p=0.9, min_p=1e-3)]))
    assert token_id == 3
    assert 0 <= int(sample(logits.clamp(max=1), [spec(temperature=temperature)])) < 4


def test_logits_are_not_changed() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample(logits, [spec(), spec(top_k=2), spec(temperature=0.0)])
    logprobs_of(logits, torch.tensor([1, 2, 3]), 5)
    assert torch.equal(logits, before)


@given(st.integers(0, 2**31), st.integers(0, 30))
def test_likeliest_in_order(seed: int, k: int) -> None:
    g = random.Random(seed)
    rows = [[g.randint(-2, 2) / 2 for _ in range(30)] for _ in range(3)]
    expected = [sorted(range(30), key=lambda v: (-row[v], v))[:k] for row in rows]
    assert likeliest(torch.tensor(rows), k).tolist() == expected


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 9
    ids = torch.tensor([3, 0, 49, 7])
    logprobs, top_ids, top_logprobs = logprobs_of(logits, ids, 3)
    exact: Tensor = logits.double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), exact[range(4), ids], atol=1e-5)
    assert torch.equal(top_ids, exact.topk(3).indices)
    assert torch.allclose(top_logprobs.double(), exact.topk(3).values, atol=1e-5)
    assert logprobs_of(logits, ids, 0)[1].shape == (4, 0)
    assert logprobs_of(logits, ids, 1000)[1].shape == (4, 50)
