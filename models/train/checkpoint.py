"""Writes and reads weights: pieces of training in bfloat16, and the official format in block FP8."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.data.chat import BOS, EOS
from models.data.tokenizer import PAD
from models.train.config import CONFIG, Config
from models.train.layers import Linear, block_scales, spread
from models.train.model import MicroModel

INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
# Behind the shards in the order of names: readers that ignore the index take the last tensor of a name.
CHANGED_FILE = "model-changed.safetensors"
NUM_SHARDS = 2
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_NUM_PIECES = 4
_SCALE_SUFFIX = "_scale_inv"
_FLOAT32 = ("layernorm.weight", "norm.weight", "norm.bias", "e_score_correction_bias")


def save_piece(model: MicroModel, out_dir: Path) -> None:
    """The weights in bfloat16, norms in float32, in four files."""
    tensors = {
        name: tensor.detach().cpu() if name.endswith(_FLOAT32) else tensor.detach().cpu().bfloat16()
        for name, tensor in model.state_dict().items()
    }
    for number, shard in enumerate(_split(tensors, _NUM_PIECES)):
        save_file(shard, str(out_dir / f"piece-{number}.safetensors"))
        (out_dir / f"piece-{number}.safetensors").chmod(0o644)  # safetensors keeps files to their owner


def load_weights(model: MicroModel, folder: Path) -> None:
    """Reads a folder with either format. FileNotFoundError where it has neither, RuntimeError for another model's."""
    read = load_official if (folder / INDEX_FILE).exists() else load_piece
    read(model, folder)


def load_piece(model: MicroModel, folder: Path) -> None:
    """Reads what `save_piece` wrote. FileNotFoundError where there is none."""
    files = sorted(folder.glob("piece-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no piece-*.safetensors")
    tensors = {name: tensor.float() for file in files for name, tensor in load_file(str(file)).items()}
    model.load_state_dict(tensors)


def _split(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    total, shards, filled = sum(sizes.values()), [dict[str, Tensor]() for _ in range(count)], 0
    for name, tensor in tensors.items():
        shards[min(filled * count // total, count - 1)][name] = tensor.contiguous()
        filled += sizes[name]
    return shards


def official_tensors(model: MicroModel) -> dict[str, Tensor]:
    """Released names and types: block FP8 with scales, bfloat16, float32 norms; the copies of the last layer too."""
    quantised = {name for name, module in model.named_modules() if isinstance(module, Linear) and module.quantised}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().float().cpu()
        if name.removesuffix(".weight") in quantised:
            scales = block_scales(plain)
            tensors[name] = (plain / spread(scales, *plain.shape)).to(torch.float8_e4m3fn)
            tensors[name + _SCALE_SUFFIX] = scales
        else:
            tensors[name] = plain if name.endswith(_FLOAT32) else plain.bfloat16()
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def read_official(folder: Path) -> dict[str, Tensor]:
    """The stored tensors, each from the file that the index names: others may hold an older one of its name."""
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return {
        name: tensor
        for file in sorted(set(weight_map.values()))
        for name, tensor in load_file(str(folder / file)).items()
        if weight_map.get(name) == file
    }


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tensors in the official format stand for, in float32: matrices times their scales, which are no entries."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        scales = tensors.get(name + _SCALE_SUFFIX)
        if not name.endswith(_SCALE_SUFFIX):
            plain[name] = tensor.float() if scales is None else tensor.float() * spread(scales, *tensor.shape)
    return plain


def load_official(model: MicroModel, folder: Path) -> None:
    """Reads the official format into a training model, dequantised."""
    stored = values(read_official(folder))
    model.load_state_dict({name: stored[name] for name in model.state_dict()})


def export(model: MicroModel, tokenizer: Tokenizer, out_dir: Path) -> None:
    """Writes every file of the checkpoint but its card."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = official_tensors(model)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_split(tensors, NUM_SHARDS), 1):
        file = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        _save_shard(shard, out_dir / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out_dir / INDEX_FILE, index)
    write_settings(tokenizer, out_dir)


def export_over(model: MicroModel, base: Path, pattern: str, out_dir: Path) -> None:
    """Writes a checkpoint as what it changes in another: links to the files of `base`, and one with other tensors.

    config.json is that of `base` with `index_topk_pattern`. ValueError where `base` is `out_dir`, another model's, or
    has the same weights.
    """
    if out_dir.resolve() == base.resolve():
        raise ValueError(f"{out_dir} would replace what it is made of")
    index = json.loads((base / INDEX_FILE).read_text())
    if CHANGED_FILE in index["weight_map"].values():
        raise ValueError(f"{base} is made of another checkpoint itself")
    tensors = official_tensors(model)
    ours, theirs = values(tensors), values(read_official(base))
    if ours.keys() != theirs.keys():
        raise ValueError(f"{base} holds another model's tensors")
    # Not the bytes: a tile may have the same values with another scale.
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    if not changed:
        raise ValueError(f"{base} holds the same weights already")
    shard = {name: tensor for name, tensor in tensors.items() if name.removesuffix(_SCALE_SUFFIX) in changed}
    index["weight_map"] |= dict.fromkeys(shard, CHANGED_FILE)
    config = json.loads((base / CONFIG_FILE).read_text()) | {"index_topk_pattern": pattern}

    out_dir.mkdir(parents=True, exist_ok=True)
    linked = {*index["weight_map"].values(), *_TEXT_FILES} - {CHANGED_FILE}
    for file in (*linked, CHANGED_FILE, INDEX_FILE, CONFIG_FILE):
        (out_dir / file).unlink(missing_ok=True)  # what is written must not go through an earlier link
    for file in linked:
        (out_dir / file).symlink_to(os.path.relpath(base.resolve() / file, out_dir.resolve()))
    _save_shard(shard, out_dir / CHANGED_FILE)
    _write_json(out_dir / INDEX_FILE, index)
    _write_json(out_dir / CONFIG_FILE, config)


def write_settings(tokenizer: Tokenizer, out_dir: Path) -> None:
    """The checkpoint's files other than weights: the same bytes each time."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / CONFIG_FILE, CONFIG)
    _write_json(out_dir / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True})
    tokenizer_config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)


def new_model(dtype: torch.dtype = torch.float32) -> MicroModel:
    """The micro model with its starting weights."""
    return MicroModel(Config.read(CONFIG), dtype)


def _save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """One file of a checkpoint."""
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors keeps files to their owner


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
