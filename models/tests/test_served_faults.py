"""Faults that only serving can have, planted into the worker: needle questions must notice them.

Those of the model itself are in `models/train/faults.py`; these need pages that outlive a request, or packed keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from baleen_eval.texts.examples import examples
from baleen_kernels import latent_pack
from baleen_worker import LLM
from baleen_worker.cache.storage import PagedPools
from tokenizers import Tokenizer
from torch import Tensor

from models.data.mixture import Encoder

pytestmark = pytest.mark.slow

MICRO = Path(__file__).resolve().parents[1] / "micro"
NUM_QUESTIONS = 12


@pytest.fixture(scope="module")
def questions() -> list[tuple[list[int], list[int]]]:
    """Prompt and right answer of needle questions in texts of 1K tokens, four times what is selected."""
    encode = Encoder(Tokenizer.from_file(str(MICRO / "tokenizer.json")))
    pairs: list[tuple[list[int], list[int]]] = []
    for conversation in examples("needle", NUM_QUESTIONS, seed=11, lengths=(1024,)):
        ids, weights = encode(conversation)
        first = next(place for place, weight in enumerate(weights) if weight == 1.0)
        pairs.append((list(ids[:first]), list(ids[first:])))
    return pairs


@pytest.fixture
def micro() -> Iterator[LLM]:
    with LLM(MICRO, dtype="float32", max_total_tokens=32768) as llm:
        yield llm


def accuracy(llm: LLM, questions: list[tuple[list[int], list[int]]], *, cached: bool) -> float:
    longest = max(len(answer) for _, answer in questions)
    completions = llm.generate([prompt for prompt, _ in questions], {"temperature": 0, "max_tokens": longest})
    assert all((completion.num_cached_tokens > 0) == cached for completion in completions)
    right = [
        completion.token_ids[: len(answer)] == answer
        for completion, (_, answer) in zip(completions, questions, strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.parametrize("stale", [False, True], ids=["sound", "stale"])
def test_stale_index_keys_after_a_prefix_hit(
    micro: LLM, questions: list[tuple[list[int], list[int]]], stale: bool
) -> None:
    fault = patch.object(PagedPools, "write_index_k", lambda *_: None) if stale else nullcontext()
    with fault:  # as the prompts are computed first; who asks again finds their pages
        micro.generate([prompt for prompt, _ in questions], {"temperature": 0, "max_tokens": 1})
    found = accuracy(micro, questions, cached=True)
    assert (found < 0.8) if stale else (found > 0.9)


@pytest.mark.parametrize("wrong", [False, True], ids=["sound", "wrong"])
def test_fp8_scales_of_the_wrong_row(questions: list[tuple[list[int], list[int]]], wrong: bool) -> None:
    unpack = latent_pack.unpack_latent_fp8

    def unpack_shifted(packed: Tensor, *, latent: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        end = latent + latent // 128 * 4
        scales = packed[:, latent:end].roll(1, 0)
        return unpack(
            torch.cat([packed[:, :latent], scales, packed[:, end:]], 1), latent=latent, rope=rope, dtype=dtype
        )

    fault = patch.object(latent_pack, "unpack_latent_fp8", unpack_shifted) if wrong else nullcontext()
    with fault, LLM(MICRO, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", max_total_tokens=32768) as llm:
        found = accuracy(llm, questions, cached=False)
    assert (found < 0.8) if wrong else (found > 0.9)
