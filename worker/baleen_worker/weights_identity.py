"""Tells checkpoints apart without reading all of them: workers with other weights must never exchange pages.

A digest over every weight file's name, size, header and samples of its data. Two fine-tunes of one model differ in
nearly all of their data, so samples find it; what they cannot find is a file that was damaged in few places.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def weights_identity(model_dir: Path, *, load_format: str, seed: int) -> str:
    """16 hex digits. Dummy weights are told apart by their seed."""
    if load_format == "dummy":
        return hashlib.sha256(f"dummy {seed}".encode()).hexdigest()[:16]
    digest = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(size * sample // _SAMPLES_PER_FILE)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
