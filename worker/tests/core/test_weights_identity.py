"""Checkpoints that differ anywhere it matters are told apart, and none is told apart from its copy."""

from __future__ import annotations

import shutil
from pathlib import Path

from baleen_worker.weights_identity import weights_identity
from worker_process import MODEL


def identity(folder: Path, load_format: str = "auto", seed: int = 0) -> str:
    return weights_identity(folder, load_format=load_format, seed=seed)


def test_a_copy_is_the_same_and_another_fine_tune_is_not(tmp_path: Path) -> None:
    copy = shutil.copytree(MODEL, tmp_path / "copy")
    assert identity(copy) == identity(MODEL)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    for place in range(len(data) // 2, len(data), 512):  # every number of the last half may have moved
        data[place] ^= 1
    weights.write_bytes(data)
    assert identity(copy) != identity(MODEL)


def test_dummy_weights_are_told_apart_by_their_seed() -> None:
    assert identity(MODEL, "dummy", 1) == identity(MODEL, "dummy", 1)
    assert len({identity(MODEL), identity(MODEL, "dummy", 1), identity(MODEL, "dummy", 2)}) == 3
