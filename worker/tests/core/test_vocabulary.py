"""The bytes of tokens equal what the tokenizers library decodes, and control tokens stand for none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baleen_worker.vocabulary import read_control_tokens, read_token_bytes
from tokenizers import Tokenizer

MICRO = Path(__file__).resolve().parents[3] / "models/micro"


def test_bytes_equal_what_the_library_decodes() -> None:
    tokenizer = Tokenizer.from_file(str(MICRO / "tokenizer.json"))
    found = read_token_bytes(MICRO, 2048)
    assert len(found) == 2048
    text = 'Olá, 日本語 e 🐋: {"a": [1, -2.5e3]}\n\t</think>'
    ids = tokenizer.encode(text.replace("</think>", ""), add_special_tokens=False).ids
    assert b"".join(found[token_id] for token_id in ids).decode() == text.replace("</think>", "")
    decodable = [token_id for token_id, spelled in enumerate(found) if spelled and spelled.isascii()]
    assert len(decodable) > 1000
    assert all(tokenizer.decode([token_id]) == found[token_id].decode() for token_id in decodable)


def test_control_tokens_stand_for_no_bytes() -> None:
    control_ids = read_control_tokens(MICRO)
    assert control_ids["<think>"] == 2001
    assert control_ids["｜DSML｜"] == 2000
    found = read_token_bytes(MICRO, 2048)
    assert all(found[token_id] == b"" for token_id in control_ids.values())
    assert found[2040] == b"", "an id without a token"


def test_a_folder_without_tokenizer_has_no_control_tokens(tmp_path: Path) -> None:
    assert read_control_tokens(tmp_path) == {}


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("{", "tokenizer.json"),
        ({"model": {"type": "Unigram", "vocab": {}}}, "Unigram"),
        ({"model": {"type": "BPE", "vocab": {" ": 0}}}, "byte-level alphabet"),
        ({"model": {"type": "BPE"}}, "vocab"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, tokenizer: object, words: str) -> None:
    text = tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_token_bytes(tmp_path, 10)
