"""A checkpoint that is what it changes in another: links to its files, one small file, and a pattern.

The one under test is made as `models/micro-index-cache` is: a stage of training, a piece, and the command that exports.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from baleen_worker.checkpoint import open_checkpoint
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import load_model_config
from baleen_worker.weights import load_weights as load_into_worker
from safetensors.torch import load_file
from torch import Tensor

from models.train import export
from models.train.checkpoint import (
    export_over,
    load_official,
    load_piece,
    load_weights,
    new_model,
    read_official,
    save_piece,
)
from models.train.layers import Linear
from models.train.loop import Trainer
from models.train.stages import STAGES

MICRO = Path(__file__).parents[1] / "micro"
STORED = MICRO.with_name("micro-index-cache")
INDEXER = "model.layers.0.self_attn.indexer."


def export_with(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", *map(str, arguments)])
        export.main()


def serving(folder: Path) -> DeepseekForCausalLM:
    """The worker's model, where the middle layer reuses the selection of the first."""
    config = load_model_config(folder, '{"index_topk_pattern": "FSF"}')
    with torch.device("meta"):
        model = DeepseekForCausalLM(config, Numerics.for_dtype(torch.float32))
    load_into_worker(model, folder, config, device=torch.device("cpu"))
    return model


@pytest.fixture(autouse=True)
def plain_weights() -> None:
    Linear.round_weights = False


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a stage that moves the first indexer leaves; more of it than two steps would move."""
    folder = tmp_path_factory.mktemp("piece")
    torch.manual_seed(0)
    model = new_model()
    load_weights(model, MICRO)
    Trainer(model, MICRO / "tokenizer.json", folder / "log.jsonl", torch.device("cpu")).run(
        STAGES["smoke-share"], seed=1, num_workers=0
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(INDEXER):
                parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter) if "norm" not in name else 0.01)
    save_piece(model, folder)
    return folder


@pytest.fixture(scope="module")
def overlay(piece: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "micro-shared"
    export_with(piece, out, "--over", MICRO, "--pattern", "FSF")
    return out


@pytest.fixture(scope="module")
def whole(piece: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with every tensor written."""
    out = tmp_path_factory.mktemp("whole")
    export_with(piece, out)
    return out


def test_only_what_differs_is_stored(overlay: Path) -> None:
    files = {path.name: path for path in overlay.iterdir()}
    written = {name for name, path in files.items() if not path.is_symlink()}
    assert written == {"config.json", "model.safetensors.index.json", "model-changed.safetensors"}
    assert files.keys() - written == {path.name for path in MICRO.iterdir()} - written - {"README.md"}
    for name in files.keys() - written:
        assert not files[name].readlink().is_absolute()
        assert files[name].resolve() == (MICRO / name).resolve()
    indexer = {name for name in read_official(MICRO) if name.startswith(INDEXER)}
    assert load_file(str(overlay / "model-changed.safetensors")).keys() == indexer
    assert files["model-changed.safetensors"].stat().st_size < 1_200_000
    config, base = (json.loads((folder / "config.json").read_text()) for folder in (overlay, MICRO))
    assert config == {**base, "index_topk_pattern": "FSF"}


def test_every_reader_takes_the_changed_tensors(overlay: Path, whole: Path) -> None:
    ours, written, base = new_model(), new_model(), new_model()
    for model, folder in ((ours, overlay), (written, whole), (base, MICRO)):
        load_official(model, folder)
    others = base.state_dict()
    for (name, tensor), same in zip(ours.state_dict().items(), written.state_dict().values(), strict=True):
        assert torch.equal(tensor, same), name
        assert torch.equal(tensor, others[name]) != name.startswith(INDEXER), name
    read = open_checkpoint(overlay).tensors
    assert {name for name, header in read.items() if header.file.name == "model-changed.safetensors"} == {
        name for name in read if name.startswith(INDEXER)
    }
    assert read.keys() == open_checkpoint(MICRO).tensors.keys()
    # Who reads all files in the order of their names, and no index, ends with the same tensors.
    last: dict[str, Tensor] = {}
    for file in sorted(overlay.glob("*.safetensors")):
        last |= load_file(str(file))
    stored = read_official(overlay)
    assert all(torch.equal(last[name].float(), tensor.float()) for name, tensor in stored.items())


def test_the_index_decides_whatever_the_files_are_called(overlay: Path, tmp_path: Path) -> None:
    first = "a.safetensors"  # in front of the shard that holds the older tensors
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).symlink_to(MICRO / name)
    shutil.copy(overlay / "model-changed.safetensors", tmp_path / first)
    index = (overlay / "model.safetensors.index.json").read_text().replace("model-changed.safetensors", first)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert {name for name, header in open_checkpoint(tmp_path).tensors.items() if header.file.name == first} == {
        name for name in read_official(MICRO) if name.startswith(INDEXER)
    }
    expected = read_official(overlay)
    for name, tensor in read_official(tmp_path).items():
        assert torch.equal(tensor.float(), expected[name].float()), name


def test_the_worker_loads_the_changed_tensors(overlay: Path, whole: Path) -> None:
    assert load_model_config(overlay).index_layers == (True, False, True)
    assert load_model_config(overlay).config_digest != load_model_config(MICRO).config_digest
    ours, written, base = (dict(serving(folder).named_parameters()) for folder in (overlay, whole, MICRO))
    assert ours.keys() == written.keys() == base.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, written[name]), name
        assert torch.equal(parameter, base[name]) != name.startswith(INDEXER), name


def test_the_stored_one_is_micro_but_for_an_indexer() -> None:
    assert load_model_config(STORED).index_layers == (True, False, True)
    assert all(path.resolve().parent in (STORED, MICRO) for path in STORED.iterdir())
    base = read_official(MICRO)
    stored = read_official(STORED)
    assert stored.keys() == base.keys()
    changed = {name for name, tensor in stored.items() if not torch.equal(tensor.float(), base[name].float())}
    assert changed
    assert all(name.startswith(INDEXER) for name in changed)


def test_writing_again_replaces_what_was_there(piece: Path, overlay: Path, whole: Path, tmp_path: Path) -> None:
    """Over a whole checkpoint: nothing of it is left, and nothing is written through a link into another folder."""
    out, base = tmp_path / "out", tmp_path / "base"
    shutil.copytree(whole, out)
    shutil.copytree(MICRO, base)
    (out / "config.json").unlink()
    (out / "config.json").symlink_to(base / "config.json")
    (out / "README.md").write_text("kept")
    for _ in range(2):
        export_with(piece, out, "--over", base, "--pattern", "FSF")
    assert {path.name for path in out.iterdir()} == {path.name for path in overlay.iterdir()} | {"README.md"}
    assert (out / "model-00001-of-00002.safetensors").is_symlink()
    assert not (out / "config.json").is_symlink()
    assert (out / "README.md").read_text() == "kept"
    assert all((base / path.name).read_bytes() == path.read_bytes() for path in MICRO.iterdir())


def test_refusals_say_why(piece: Path, overlay: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = new_model()
    load_piece(model, piece)
    copy = tmp_path / "copy"
    shutil.copytree(MICRO, copy)
    with pytest.raises(ValueError, match="would replace what it is made of"):
        export_over(model, copy, "FSF", copy)
    with pytest.raises(ValueError, match="is made of another checkpoint itself"):
        export_over(model, overlay, "FSF", tmp_path / "out")
    same = new_model()
    load_official(same, MICRO)
    with pytest.raises(ValueError, match="holds the same weights already"):
        export_over(same, MICRO, "FSF", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for arguments in (["--pattern", "FSF"], ["--over", MICRO], ["--over", MICRO, "--pattern", "SFF"]):
        with pytest.raises(SystemExit) as refused:
            export_with(piece, tmp_path / "out", *arguments)
        assert refused.value.code == 2
    assert "--over takes a --pattern" in capsys.readouterr().err
