"""Secrets in files, and what of one a caller shows.

The secret itself never travels: a caller shows a digest of it that serves this contract alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from baleen_worker.config import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LEAST_KEY_BYTES = 16
_LABEL = b"baleen.worker.v1\0"


def read_key(file: Path, flag: str) -> bytes:
    """The secret in `file`, which `flag` has named. Raises ConfigError."""
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{flag} {file} holds {len(key)} bytes, which can be guessed: "
            f"put at least {LEAST_KEY_BYTES} random ones there"
        )
    return key


def bearer(key: bytes) -> str:
    """What a caller that knows `key` shows as `authorization`. The gateway's side is `worker/key.rs`."""
    return f"Bearer {hashlib.sha256(_LABEL + key).hexdigest()}"
