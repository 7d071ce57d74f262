"""What the head hands its rank over the pipe: configuration and facts of the model, one line of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baleen_worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the head hands its rank. `vocab_size` and `eos_token_ids` are facts of the model that the fake runner needs
    as well; `boot_epoch` is the worker's.
    """

    worker: WorkerConfig
    socket_path: Path
    head_pid: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    boot_epoch: int = 0

    def encode(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Assignment:
        """Inverse of `encode`."""
        return msgspec.json.decode(line, type=cls, dec_hook=_decode_path)


def _decode_path(kind: type[Any], value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise TypeError(f"cannot read {kind.__name__} from an assignment")
