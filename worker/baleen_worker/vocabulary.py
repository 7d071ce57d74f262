"""The bytes behind token ids, read from a model folder's tokenizer.json.

The worker knows no text but this: which bytes a token stands for, so that a grammar can be held against tokens, and
which tokens are control tokens. A control token (an added token of the tokenizer) stands for no text: the gateway tells
it from text that looks like it, and so must a grammar.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"

_T = TypeVar("_T")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Added(msgspec.Struct, frozen=True, kw_only=True):
    added_tokens: list[_AddedToken] = []


class _Model(msgspec.Struct, frozen=True):
    type: str
    vocab: dict[str, int]


class _Tokenizer(_Added, frozen=True, kw_only=True):
    model: _Model


def read_control_tokens(model_dir: Path) -> dict[str, int]:
    """Control tokens by their spelling; none when the folder has no tokenizer. Raises ValueError."""
    path = model_dir / TOKENIZER_FILE
    if not path.is_file():
        return {}
    return {token.content: token.id for token in _decode(path, _Added).added_tokens}


def read_token_bytes(model_dir: Path, vocab_size: int) -> list[bytes]:
    """The bytes of each id below `vocab_size`; empty for control tokens and ids without a token. Raises ValueError."""
    path = model_dir / TOKENIZER_FILE
    tokenizer = _decode(path, _Tokenizer)
    if tokenizer.model.type != "BPE":
        raise ValueError(f"{path}: model type {tokenizer.model.type} is not byte-level BPE, the only one that is read")
    control_ids = {token.id for token in tokenizer.added_tokens}
    byte_of = _byte_of_character()
    token_bytes = [b""] * vocab_size
    for text, token_id in tokenizer.model.vocab.items():
        if token_id < vocab_size and token_id not in control_ids:
            try:
                token_bytes[token_id] = bytes([byte_of[character] for character in text])
            except KeyError:
                raise ValueError(f"{path}: token {token_id} is not spelled in the byte-level alphabet") from None
    return token_bytes


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
