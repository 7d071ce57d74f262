"""Each way in which a folder's weight files can be unusable, and the sentence that says so."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from baleen_worker.checkpoint import INDEX_FILE, SINGLE_FILE, open_checkpoint
from baleen_worker.json_keys import CheckpointError
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save(folder: Path) -> None:
    """Two shards and their index."""
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, folder / A)
    save_file({"c": torch.ones(5)}, folder / B)
    write_index(folder, {"a": A, "b": A, "c": B})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), "utf-8")


def write_header(path: Path, header: object, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def single(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return folder / SINGLE_FILE


def overlap(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_header(single(folder), {"a": entry, "b": entry}, bytes(8))


def wrong_size(folder: Path) -> None:
    write_header(single(folder), {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8))


def only(*names: str) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        single(folder)
        for name in names:
            (folder / name).write_bytes(b"x")

    return prepare


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "data cut off": (lambda f: cut(f / B, 80), f"{B} is truncated or corrupt .*80 bytes.*: copy the file again"),
    "header cut off": (lambda f: cut(f / A, 20), f"{A} is truncated or corrupt"),
    "empty file": (lambda f: (f / A).write_bytes(b""), f"{A} is truncated or corrupt"),
    "not safetensors": (lambda f: (f / A).write_bytes(b"\x80\x02" * 500), f"{A} is truncated or corrupt"),
    "huge header": (lambda f: (f / A).write_bytes(b"\xff" * 64), f"{A} is truncated or corrupt"),
    "header no JSON": (
        lambda f: (f / A).write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        f"{A} is truncated or corrupt",
    ),
    "overlapping tensors": (overlap, f"{SINGLE_FILE} is truncated or corrupt"),
    "shape against size": (wrong_size, f"{SINGLE_FILE} is truncated or corrupt"),
    "Git LFS": (
        lambda f: (f / A).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        f"{A} is a Git LFS pointer",
    ),
    "missing shard": (lambda f: (f / B).unlink(), rf"1 of the 2 weight files .* are missing \({B}\): copy them"),
    "index too much": (
        lambda f: write_index(f, {"a": A, "d": B}),
        rf"names tensors that their files do not hold \(d in {B}\)",
    ),
    "index elsewhere": (lambda f: write_index(f, {"a": "../x.safetensors"}), "places a in '../x.safetensors'"),
    "index to pickle": (lambda f: write_index(f, {"a": "x.bin"}), "places a in 'x.bin'"),
    "index empty": (lambda f: write_index(f, {}), "has no weight_map"),
    "index no JSON": (lambda f: (f / INDEX_FILE).write_text("{"), f"{INDEX_FILE} is not valid JSON"),
    "no index": (lambda f: (f / INDEX_FILE).unlink(), f"holds {A}, {B} but neither .* copy the index"),
    "pickles": (
        only("pytorch_model.bin", "extra.pt"),
        r"holds only pickled weights \(extra.pt, pytorch_model.bin\).*convert them to safetensors",
    ),
    "nothing": (only(), "holds no weights"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(tmp_path: Path, case: str) -> None:
    save(tmp_path)
    prepare, sentence = BROKEN[case]
    prepare(tmp_path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_headers_of_shards(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = open_checkpoint(tmp_path).tensors
    assert {name: (h.file.name, h.shape, h.dtype, h.num_bytes) for name, h in tensors.items()} == {
        "a": (A, (2, 3), "F32", 24),
        "b": (A, (4,), "BF16", 8),
        "c": (B, (5,), "F32", 20),
    }


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    save(tmp_path)
    save_file({"c": torch.ones(5), "a": torch.ones(9), "extra": torch.ones(1)}, tmp_path / B)
    tensors = open_checkpoint(tmp_path).tensors
    assert tensors["a"].shape == (2, 3)
    assert tensors["extra"].file.name == B
