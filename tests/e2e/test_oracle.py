"""What the whole stack serves equals an independent implementation: transformers, in float32, same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from harness.processes import MICRO_MODEL, Gateway
from safetensors.torch import load_file, save_file

# Longer than the number of keys the indexer selects, so that selection matters.
PROMPT_LEN = 400
NEW_TOKENS = 16
TILE = 128


def write_dequantized(folder: Path) -> None:
    """Writes the micro checkpoint as plain float32, which is what transformers reads on a CPU."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in MICRO_MODEL.glob("*.safetensors"):
        tensors |= load_file(shard)
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        plain[name] = tensor.float()
        if scales is not None:
            spread = scales.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
            plain[name] *= spread[: tensor.shape[0], : tensor.shape[1]]
    config = json.loads((MICRO_MODEL / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("plain")
    write_dequantized(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


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
    assert served == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-4)


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
        assert scores.token_logprobs == pytest.approx(logprobs, rel=1e-5, abs=1e-4)
        # The continuation, given back as ids, scores the same: the tokens are the oracle's.
        assert score(client, ids)[-NEW_TOKENS:] == pytest.approx(logprobs, rel=1e-5, abs=1e-4)
