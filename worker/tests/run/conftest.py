"""Puts this folder's own modules on the path, and makes the checkpoints that its tests read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_checkpoint import Tiny, save_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tensors are tiny: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_v32(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random V3.2 checkpoint, sharded, as transformers writes it, and its model."""
    return save_tiny(tmp_path_factory.mktemp("tiny_v32"), "deepseek_v32", max_shard_size="300KB")


@pytest.fixture(scope="session")
def tiny_v3(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random V3 checkpoint in one file, as transformers writes it, and its model."""
    return save_tiny(tmp_path_factory.mktemp("tiny_v3"), "deepseek_v3")
