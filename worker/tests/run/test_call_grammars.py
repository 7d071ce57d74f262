"""The grammars that the gateway compiles from tools: xgrammar admits the outputs it should, and no others.

The rows are those that the gateway's own tests compile. An output is tokenized as the model writes it, control tokens
by their ids. To a grammar they are bytes that no text holds, so that only their ids admit them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

xgrammar = pytest.importorskip("xgrammar")

CHECKOUT = Path(__file__).resolve().parents[3]
ROWS = [
    json.loads(line)
    for line in (CHECKOUT / "gateway/tests/data/constraints.jsonl").read_text(encoding="utf-8").splitlines()
]
TOKENIZER_JSON = CHECKOUT / "models/micro/tokenizer.json"
END_OF_SENTENCE = 1


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_JSON))


@cache
def control_tokens() -> dict[str, int]:
    added = json.loads(TOKENIZER_JSON.read_text(encoding="utf-8"))["added_tokens"]
    return {token["content"]: token["id"] for token in added}


@cache
def compiler() -> Any:
    alphabet = byte_alphabet()
    controls = set(control_tokens().values())
    vocabulary: list[bytes] = []
    for number in range(tokenizer().get_vocab_size()):
        if number in controls:
            vocabulary.append(b"\xff\xff" + number.to_bytes(4))
        else:
            token = tokenizer().id_to_token(number) or ""
            vocabulary.append(bytes(alphabet[character] for character in token))
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[END_OF_SENTENCE]
    )
    # Its cache of rules takes two rules for one that differ in the token they ask for alone (seen in 0.2.8).
    return xgrammar.GrammarCompiler(info, cache_enabled=False)


def token_ids(output: str, *, spells_markers: bool = False) -> list[int]:
    """The output's tokens; with ``spells_markers`` a marker is spelled with ordinary tokens, as text is."""
    pattern = "|".join(re.escape(text) for text in control_tokens())
    ids: list[int] = []
    for part in re.split(f"({pattern})", output):
        if part in control_tokens() and not spells_markers:
            ids.append(control_tokens()[part])
        else:
            for character in part if part in control_tokens() else [part]:
                ids += tokenizer().encode(character, add_special_tokens=False).ids
    return ids


def admits(tag: dict[str, Any], ids: list[int]) -> bool:
    """Whether the model could write these tokens and end: a mask lets each of them pass, and so does the grammar."""
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(json.dumps(tag)))
    words: Any = np.empty((1, -(-tokenizer().get_vocab_size() // 32)), dtype=np.int32)
    for number in [*ids, END_OF_SENTENCE]:
        matcher.fill_next_token_bitmask(words)
        passes = bool(np.unpackbits(words.view(np.uint8), bitorder="little")[number])
        if not passes or not matcher.accept_token(number):
            return False
    return True


CASES = [(row["name"], row["tag"], output, True) for row in ROWS for output in row["accepts"]]
CASES += [(row["name"], row["tag"], output, False) for row in ROWS for output in row["rejects"]]


@pytest.mark.parametrize(("name", "tag", "output", "wanted"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_a_tag_admits_exactly_what_it_should(name: str, tag: dict[str, Any], output: str, wanted: bool) -> None:
    assert admits(tag, token_ids(output)) == wanted, output


@pytest.mark.parametrize("row", [row for row in ROWS if "required" in row["name"]], ids=lambda row: row["name"])
def test_markup_that_is_only_spelled_is_not_admitted(row: dict[str, Any]) -> None:
    """The gateway reads calls by their control tokens, so a grammar that took spelled ones would lose them."""
    for output in row["accepts"]:
        assert not admits(row["tag"], token_ids(output, spells_markers=True)), output
