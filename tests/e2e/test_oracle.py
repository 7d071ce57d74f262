"""What the whole stack serves equals an independent implementation: transformers, in float32, same checkpoint."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness.processes import MICRO_MODEL, Gateway

torch = pytest.importorskip("torch")

PROMPT_LEN = 150
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MICRO_MODEL, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def prompt_ids() -> list[int]:
    vocab_size = json.loads((MICRO_MODEL / "config.json").read_text("utf-8"))["vocab_size"]
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, vocab_size, (PROMPT_LEN,), generator=generator).tolist()


def score(client: openai.OpenAI, ids: list[int]) -> list[float]:
    """Log-probability of each prompt token after the first, as served."""
    answer = client.completions.create(model="micro", prompt=ids, echo=True, max_tokens=0, logprobs=0)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    return scores.token_logprobs[1:]


def test_prompt_scores_equal_the_oracle(model_stack: Gateway, oracle: Any, prompt_ids: list[int]) -> None:
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt_ids])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt_ids[1:])[:, None])[:, 0]
    with model_stack.client() as client:
        served = score(client, prompt_ids)
    assert served == pytest.approx(expected.tolist(), abs=1e-4)


def test_greedy_tokens_equal_the_oracle(model_stack: Gateway, oracle: Any, prompt_ids: list[int]) -> None:
    ids = list(prompt_ids)
    logprobs = []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            row = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    with model_stack.client() as client:
        answer = client.completions.create(
            model="micro",
            prompt=prompt_ids,
            max_tokens=NEW_TOKENS,
            temperature=0,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
        scores = answer.choices[0].logprobs
        assert scores is not None
        assert scores.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        # The continuation, given back as ids, scores the same: the tokens are the oracle's.
        assert score(client, ids)[-NEW_TOKENS:] == pytest.approx(logprobs, abs=1e-4)
