"""Plugins: found by name, given the tokens so far, and alone in their failures."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from baleen_worker import logit_processors
from baleen_worker.logit_processors import ProcessorContext
from baleen_worker.request import SamplingParams
from driver import Driver, Sequence, build, prompt

if TYPE_CHECKING:
    from baleen_worker.step import BuiltRunner
    from tiny_checkpoint import Tiny
    from torch import Tensor

MODULE = """
import torch

def successor(logits, context):
    "Forces the token after the last one."
    known = [*context.prompt_token_ids, *context.output_token_ids]
    assert isinstance(context.output_token_ids, tuple)
    logits[:] = -torch.inf
    logits[(known[-1] + 1) % len(logits)] = 0.0
    return logits

def raises(logits, context):
    if len(context.output_token_ids) == 2:
        raise KeyError("secret")
    return logits

def shrinks(logits, context):
    return logits[:-1]

def forbids_all(logits, context):
    return logits - torch.inf

class Kept:
    @staticmethod
    def same(logits, context):
        return logits

number = 5
"""


@pytest.fixture(scope="module")
def built(tiny_v32: Tiny, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plugins_for_test.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    names = ("successor", "raises", "shrinks", "forbids_all", "Kept.same")
    try:
        return build(tiny_v32.folder, logit_processors=tuple((name, f"plugins_for_test:{name}") for name in names))
    finally:
        sys.path.remove(str(folder))


def greedy(*names: str, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=0, temperature=0.0, logit_processors=names, **fields)  # type: ignore[arg-type]


def test_a_plugin_sees_all_tokens_and_decides(built: BuiltRunner) -> None:
    steered = [Sequence(prompt(length, length), greedy("successor")) for length in (3, 70)]
    same = Sequence(prompt(40, 1), greedy("Kept.same"))
    plain = Sequence(prompt(40, 1), greedy())
    Driver(built, 5).run([*steered, same, plain])
    for sequence in steered:
        last = sequence.prompt[-1]
        assert sequence.output == [(last + 1 + step) % 300 for step in range(8)]
    assert same.output == plain.output


def test_log_probabilities_are_those_before_the_plugin(built: BuiltRunner, tiny_v32: Tiny) -> None:
    sequence = Sequence(prompt(20, 2), greedy("successor", logprobs=0))
    Driver(built, 1).run([sequence])
    expected = tiny_v32.logits(sequence.prompt + sequence.output).log_softmax(-1)[19:-1]
    chosen = expected.gather(1, torch.tensor(sequence.output)[:, None])[:, 0].tolist()
    assert sequence.logprobs.logprobs == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "words"),
    [("raises", "raised KeyError"), ("shrinks", "did not return"), ("forbids_all", "left no token")],
)
def test_a_plugin_that_fails_ends_its_request_alone(built: BuiltRunner, name: str, words: str) -> None:
    failing = Sequence(prompt(30, 3), greedy("successor", name))
    beside = [Sequence(prompt(40, 1), greedy()), Sequence(prompt(41, 1), greedy("successor"))]
    alone = Sequence(prompt(40, 1), greedy())
    Driver(built, 9).run([alone])
    Driver(built, 7).run([failing, *beside])
    assert failing.error is not None
    assert f"logit processor {name} {words}" in failing.error
    assert "secret" not in failing.error
    assert len(failing.output) == (2 if name == "raises" else 0)
    assert beside[0].output == alone.output
    assert len(beside[1].output) == 8


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("no_such_module_at_all:f", "cannot be loaded"),
        ("math:no_such_thing", "cannot be loaded"),
        ("math:pi", "not callable"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        logit_processors.load({"mine": place})
    assert "mine" in str(caught.value)


def test_installed_distributions_offer_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[baleen.logit_processors]\nround = math:floor\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [d.version for d in metadata.distributions() if d.metadata["Name"] == "plug"] == ["1.0"]
    assert logit_processors.installed() == {"round": "math:floor"}
    assert logit_processors.load(logit_processors.installed())["round"] is __import__("math").floor


def test_a_context_shows_tokens_only() -> None:
    logits = torch.zeros(3)

    def probe(logits: Tensor, context: ProcessorContext) -> Tensor:
        assert list(context.prompt_token_ids) == [1]
        return logits

    assert logit_processors.apply("probe", probe, logits, ProcessorContext((1,), ())) is logits
