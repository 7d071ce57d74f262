"""Training's own modules learn a little, survive a round trip through files, and notice planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from baleen_eval.texts.examples import examples
from baleen_worker.model_config import load_model_config
from tokenizers import Tokenizer
from torch import Tensor

from models.train.attention import Mode, Pass
from models.train.checkpoint import export, load_official, load_piece, load_weights, new_model, save_piece
from models.train.evaluate import score
from models.train.faults import FAULTS
from models.train.layers import Linear
from models.train.loop import Trainer
from models.train.model import MicroModel
from models.train.rotary import table
from models.train.stages import STAGES

MICRO = Path(__file__).parents[1] / "micro"


@pytest.fixture(autouse=True)
def plain_weights() -> None:
    Linear.round_weights = False


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MICRO / "tokenizer.json"))


@pytest.fixture
def micro() -> MicroModel:
    model = new_model().eval()
    load_official(model, MICRO)
    return model


@torch.no_grad()
def train_logits(model: MicroModel, ids: Tensor, mode: Mode) -> Tensor:
    cos, sin = table(model.config, len(ids), ids.device)
    return model.logits(model(ids[None], Pass(mode, cos, sin))[0])[0]


def test_a_piece_and_the_official_format_keep_the_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = new_model()
    save_piece(model, tmp_path)
    again = new_model()
    load_piece(again, tmp_path)
    for (name, ours), theirs in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-8), name
    export(model, tokenizer, tmp_path / "official")
    assert load_model_config(tmp_path / "official").num_nextn_predict_layers == 1
    load_official(again, tmp_path / "official")
    Linear.round_weights = True
    ids = torch.arange(3, 23)
    stored = train_logits(again.eval(), ids, Mode.SPARSE)
    # What training sees as rounded is what the file holds; the embedding and head are rounded to bfloat16 besides.
    assert (train_logits(model.eval(), ids, Mode.SPARSE) - stored).abs().max() < 0.02 * stored.abs().max()


def test_every_stage_takes_steps(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = new_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model, tmp_path / "tokenizer.json", tmp_path / "log.jsonl", torch.device("cpu"))
    stages = [STAGES[name] for name in ("smoke-dense", "smoke-warm", "smoke-sparse", "smoke-share")]
    for stage in stages:
        trainer.run(stage, seed=1, num_workers=0)
    assert trainer.steps == sum(stage.max_steps for stage in stages)
    still = [name for name, parameter in model.named_parameters() if torch.equal(before[name], parameter)]
    assert still == []
    assert "index" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize(
    ("stage", "trained"), [("smoke-warm", ".indexer."), ("smoke-share", "model.layers.0.self_attn.indexer.")]
)
def test_a_stage_for_indexers_moves_nothing_else(
    tmp_path: Path, tokenizer: Tokenizer, stage: str, trained: str
) -> None:
    torch.manual_seed(0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = new_model()
    load_weights(model, MICRO)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model, tmp_path / "tokenizer.json", tmp_path / "log.jsonl", torch.device("cpu"))
    trainer.run(STAGES[stage], seed=1, num_workers=0)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert moved == {name for name in before if trained in name}


def test_a_shared_indexer_learns_from_both_layers(micro: MicroModel) -> None:
    ids = torch.arange(3, 323)[None]
    step = Pass(Mode.SHARE, *table(micro.config, 320, ids.device), torch.tensor([[290, 300, 319]]), "FSF")
    stats = micro.sharing(ids, step)
    weights = dict(micro.named_parameters())
    first, second = (weights[f"model.layers.{number}.self_attn.indexer.wq_b.weight"] for number in (0, 1))
    for stat in stats:
        assert stat is not None
        moves, unused = torch.autograd.grad(stat[0], (first, second), retain_graph=True, allow_unused=True)
        assert moves.abs().max() > 0.0
        assert unused is None
    assert len(stats) == 2


@pytest.mark.parametrize("suite", ["needle", "track", "arith", "tools"])
def test_the_checkpoint_answers(micro: MicroModel, tokenizer: Tokenizer, suite: str) -> None:
    conversations = examples(suite, 6, seed=5, lengths=(512,))
    result = score(micro, tokenizer, conversations, mode=Mode.SPARSE, batch_tokens=2048)
    assert result["accuracy"] > 0.8
    assert result["tokens_per_step"] >= 1.7


@pytest.mark.parametrize("fault", ["Hadamard on one side", "top-k off by a page", "KV written one slot late"])
def test_a_planted_fault_shows(micro: MicroModel, tokenizer: Tokenizer, fault: str) -> None:
    with FAULTS[fault]():
        result = score(
            micro, tokenizer, examples("needle", 4, seed=5, lengths=(512,)), mode=Mode.SPARSE, batch_tokens=2048
        )
    assert result["accuracy"] < 0.9
