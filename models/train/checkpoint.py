"""Writes and reads weights: pieces of training in bfloat16, and the official format in block FP8."""

from __future__ import annotations

import json
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

NUM_SHARDS = 2
_NUM_PIECES = 4
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
    read = load_official if (folder / "model.safetensors.index.json").exists() else load_piece
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
            tensors[name + "_scale_inv"] = scales
        else:
            tensors[name] = plain if name.endswith(_FLOAT32) else plain.bfloat16()
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def load_official(model: MicroModel, folder: Path) -> None:
    """Reads the official format into a training model, dequantised."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(str(folder / file))
    tensors: dict[str, Tensor] = {}
    for name in model.state_dict():
        tensor = stored[name].float()
        if name + "_scale_inv" in stored:
            tensor = tensor * spread(stored[name + "_scale_inv"], *tensor.shape)
        tensors[name] = tensor
    model.load_state_dict(tensors)


def export(model: MicroModel, tokenizer: Tokenizer, out_dir: Path) -> None:
    """Writes every file of the checkpoint but its card."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = official_tensors(model)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_split(tensors, NUM_SHARDS), 1):
        file = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, str(out_dir / file), metadata={"format": "pt"})
        (out_dir / file).chmod(0o644)  # safetensors keeps files to their owner
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out_dir / "model.safetensors.index.json", index)
    write_settings(tokenizer, out_dir)


def write_settings(tokenizer: Tokenizer, out_dir: Path) -> None:
    """The checkpoint's files other than weights: the same bytes each time."""
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / "config.json", CONFIG)
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
