"""The master test on a GPU: the trained model's answers are the same text whatever their computation had to share.

Rounding depends on how many rows a product has, so log-probabilities move within a tolerance, and where two tokens are
as good as equally likely, either may be chosen: an answer may leave the plainest run's only there. Run twice under the
same circumstances, nothing moves at all. Pages are poisoned before they are used and whenever they are given back, so a
key that was read too late or never written is NaN, which passes nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from baleen_eval.texts.conversation import Conversation
from baleen_eval.texts.examples import examples
from baleen_worker.config import HostCacheConfig, WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import BuiltRunner
from circumstances import Circumstances, covering
from model_rig import Answer, serve
from tokenizers import Tokenizer

pytestmark = pytest.mark.gpu

MICRO = Path(__file__).resolve().parents[3] / "models" / "micro"
MAX_TOKENS = 14
# Of log-probabilities, which moved by up to 0.13 on an H200; and how much likelier one token may be than another that
# is chosen instead of it, up to 0.26 there, in prompts without sense.
TOLERANCE = 0.25
NEAR_TIE = 0.4
MODES = {"graph": False, "eager": True}
KEYS = ("auto", "fp8_e4m3")


def conversations() -> list[Conversation]:
    """One of each length: within the selection, about as long, and beyond it."""
    return list(examples("needle", 1, seed=11, lengths=(192, 320, 512)))


def prompts() -> list[list[int]]:
    """Facts in texts, and what they are asked for; and prompts without sense around the edges of pages."""
    tokenizer = Tokenizer.from_file(str(MICRO / "tokenizer.json"))
    asked = []
    for conversation in conversations():
        *system, user, _ = (message.content for message in conversation.messages)
        marked = f"<｜begin▁of▁sentence｜>{''.join(system)}<｜User｜>{user}<｜Assistant｜></think>"
        asked.append(tokenizer.encode(marked, add_special_tokens=False).ids)
    return [*asked, *(random.Random(length).choices(range(3, 1900), k=length) for length in (63, 257))]


def greedy(count: int) -> list[SamplingParams]:
    """One for each subject; seeds tell subjects apart and choose nothing."""
    return [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, temperature=0.0, logprobs=2) for seed in range(count)]


class Judge:
    """The model on a device, and its plainest answers."""

    def __init__(self, kv_cache_dtype: str, mode: str) -> None:
        config: dict[str, Any] = {
            "device": "cuda",
            "arithmetic": "fused",
            "kv_cache_dtype": kv_cache_dtype,
            "disable_cuda_graph": MODES[mode],
            "cuda_graph_bs": (1, 4, 8, 16, 40),
            "max_running_requests": 40,
            "max_total_tokens": 64 * 300,
            "mem_fraction_static": 0.3,
            "host_cache": HostCacheConfig("write_back", ratio=1.0),
        }
        self.built: BuiltRunner = build_runner(WorkerConfig(model_dir=MICRO, **config))
        self.prompts = prompts()
        self.plain = self.serve(Circumstances())

    def serve(self, how: Circumstances) -> list[Answer]:
        """All prompts, one after another."""
        answers, service = serve(self.built, how, self.prompts, greedy(len(self.prompts)))
        preemptions = service.scheduler.load.preemptions
        assert (preemptions > 0) == how.displaced
        if how.write_policy is not None:
            assert service.scheduler.load.host_fetched_pages > 0
        return answers


@pytest.fixture(scope="module", params=[(keys, mode) for keys in KEYS for mode in MODES], ids="-".join)
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    import torch

    yield Judge(*request.param)
    torch.cuda.empty_cache()


def test_the_same_circumstances_give_the_same_bits(judge: Judge) -> None:
    for how in (Circumstances(), Circumstances(chunk=128, prefix="part", depth=2)):
        first, second = judge.serve(how), judge.serve(how)
        assert [a.token_ids for a in first] == [a.token_ids for a in second]
        assert [a.logprobs for a in first] == [a.logprobs for a in second]


@pytest.mark.parametrize("how", covering(), ids=str)
def test_answers_stay_the_same_text(judge: Judge, how: Circumstances) -> None:
    furthest, ties = 0.0, []
    for number, (found, plain) in enumerate(zip(judge.serve(how), judge.plain, strict=True)):
        assert found.error is None, f"{how}: {found.error}"
        assert len(found.token_ids) == MAX_TOKENS
        for place in range(MAX_TOKENS):
            if found.token_ids[place] != plain.token_ids[place]:
                assert plain.margins[place] < NEAR_TIE, f"{how}: prompt {number} leaves the plain answer at {place}"
                ties.append(plain.margins[place])
                break
            moved = abs(found.logprobs[place] - plain.logprobs[place])
            assert moved < TOLERANCE, f"{how}: prompt {number} moves by {moved:.3f} at {place}"
            furthest = max(furthest, moved)
    print(f"{how}: log-probabilities move by at most {furthest:.4f}; margins of ties that part: {ties}")


def test_the_model_knows_the_answers(judge: Judge) -> None:
    """Else equal answers would say little."""
    tokenizer = Tokenizer.from_file(str(MICRO / "tokenizer.json"))
    for conversation, answer in zip(conversations(), judge.plain, strict=False):
        assert tokenizer.decode(answer.token_ids).strip() in conversation.messages[-1].content
