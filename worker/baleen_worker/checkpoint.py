"""The tensors of a model folder: which there are, in which file, of which shape and type. Reads headers only.

Only safetensors files are opened: one `model.safetensors`, or the shards that `model.safetensors.index.json` names.
Pickled weights are refused, because reading them runs their code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from baleen_worker.json_keys import CheckpointError, parse_object, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# How many names a sentence lists before it only counts.
_MAX_LISTED = 8
_GIT_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file describes it. `dtype` is spelt as in safetensors: F32, BF16, F8_E4M3, …"""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return _num_elements(self.shape) * _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers of every tensor by name. Iteration goes file by file, in the order of the data."""

    model_dir: Path
    tensors: Mapping[str, TensorHeader]


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Reads the headers of all weight files. Raises CheckpointError if any is missing, damaged or contradictory."""
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists():
        return Checkpoint(model_dir, _read_headers(single))
    if index.exists():
        return Checkpoint(model_dir, _read_shards(model_dir, index))
    raise CheckpointError(_why_no_weights(model_dir))


def open_file(path: Path) -> Any:
    """A safetensors file, memory-mapped, as a context manager. Raises CheckpointError if it is not readable as one."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(_why_unreadable(path, error)) from None


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: all of a few, the first of many."""
    ordered = list(names)
    if len(ordered) <= _MAX_LISTED:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:_MAX_LISTED])} and {len(ordered) - _MAX_LISTED:,} more"


_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    with open_file(path) as file:
        headers: dict[str, TensorHeader] = {}
        for name in file.offset_keys():
            entry = file.get_slice(name)
            headers[name] = TensorHeader(path, tuple(entry.get_shape()), entry.get_dtype())
        return headers


def _read_shards(model_dir: Path, index: Path) -> dict[str, TensorHeader]:
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (model_dir / file).is_file()]:
        raise CheckpointError(
            f"{model_dir}: {len(missing)} of the {len(files)} weight files that {INDEX_FILE} names are missing "
            f"({listed(missing)}): copy them into the folder"
        )
    tensors: dict[str, TensorHeader] = {}
    lacking: list[str] = []
    for file in files:
        headers = _read_headers(model_dir / file)
        lacking += [f"{name} in {file}" for name, place in weight_map.items() if place == file and name not in headers]
        for name, header in headers.items():
            # A tensor that the index does not mention is still there; one that it places elsewhere is a leftover.
            if weight_map.get(name, file) == file:
                tensors[name] = header
    if lacking:
        raise CheckpointError(
            f"{index} names tensors that their files do not hold ({listed(lacking)}): "
            "index and weight files come from different downloads, copy them again"
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_object(index, read_bytes(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files: copy the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or re.fullmatch(r"[^/\\]+\.safetensors", file) is None:
            raise CheckpointError(
                f"{index} places {name} in {file!r}, but weights are read only from .safetensors files in the folder"
            )
    return weight_map


def _why_no_weights(model_dir: Path) -> str:
    names = sorted(path.name for path in model_dir.iterdir()) if model_dir.is_dir() else []
    if loose := [name for name in names if name.endswith(".safetensors")]:
        return (
            f"{model_dir} holds {listed(loose)} but neither {SINGLE_FILE} nor {INDEX_FILE}: "
            "copy the index that belongs to these files"
        )
    if pickled := [name for name in names if name.endswith(_PICKLED)]:
        return (
            f"{model_dir} holds only pickled weights ({listed(pickled)}), and reading those would run their code: "
            "convert them to safetensors"
        )
    return f"{model_dir} holds no weights: {SINGLE_FILE} or {INDEX_FILE} with its files is needed"


def _why_unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"{path} cannot be read: {error.strerror}"
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
            return f"{path} is a Git LFS pointer and not the weights: fetch it with `git lfs pull`"
    reason = str(error).removeprefix("Error while deserializing header: ")
    return f"{path} is truncated or corrupt ({reason}; {path.stat().st_size:,} bytes): copy the file again"


def _num_elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
