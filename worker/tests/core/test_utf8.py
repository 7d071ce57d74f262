"""A constrained answer is well-formed UTF-8, whatever its grammar would let through."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from baleen_worker.grammar.backend import Matcher
from baleen_worker.grammar.utf8 import Utf8Rules
from baleen_worker.request import Constraint
from baleen_worker.vocabulary import read_token_bytes
from constrained_rig import EOS, MICRO, MICRO_VOCABULARY, VOCAB_SIZE

TOKEN_OF_BYTE = {
    spelled[0]: token_id for token_id, spelled in enumerate(read_token_bytes(MICRO, VOCAB_SIZE)) if len(spelled) == 1
}
# A constraint, and the beginning of an answer to it that any character may follow.
PLACES = {
    "bounded string": (Constraint("json_schema", '{"type": "string", "maxLength": 3}'), '"'),
    "string": (Constraint("json_schema", '{"type": "string"}'), '"'),
    "pattern": (Constraint("json_schema", '{"type": "string", "pattern": "^[^a]{1,3}$"}'), '"'),
    "name": (Constraint("json_schema", '{"type": "object"}'), '{"'),
    "dot": (Constraint("regex", ".{1,5}"), ""),
    "class": (Constraint("regex", "[^a]+"), ""),
    "grammar": (Constraint("ebnf", "root ::= [^a]+"), ""),
}
ILL_FORMED = {
    "surrogate": b"\xed\xa0\x80",
    "last surrogate": b"\xed\xbf\xbf",
    "slash in two": b"\xc0\xaf",
    "slash in three": b"\xe0\x80\xaf",
    "slash in four": b"\xf0\x80\x80\xaf",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "continuation": b"\x80",
    "cut": b"\xe9\xafA",
}
WELL_FORMED = ["é", "ࠀ", "鯨", "\ud7ff", "\ue000", "\U00010000", "😀", "\U0010ffff"]


@cache
def grammar(place: str) -> Any:
    return MICRO_VOCABULARY.backend.compile(PLACES[place][0])


def matcher(place: str) -> Matcher:
    found = MICRO_VOCABULARY.backend.match(grammar(place), (EOS,))
    assert takes(found, PLACES[place][1].encode())
    return found


def takes(found: Matcher, text: bytes) -> bool:
    """Whether masks let the bytes through, one token each."""
    for byte in text:
        token_id = TOKEN_OF_BYTE[byte]
        if not found.allowed()[token_id // 32] >> token_id % 32 & 1:
            return False
        assert found.accept(token_id)
    return True


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sequence", ILL_FORMED.values(), ids=ILL_FORMED)
def test_no_ill_formed_sequence_comes_through(place: str, sequence: bytes) -> None:
    assert not takes(matcher(place), sequence)


@pytest.mark.parametrize("place", PLACES)
def test_every_character_comes_through(place: str) -> None:
    for character in WELL_FORMED:
        assert takes(matcher(place), character.encode()), f"U+{ord(character):X}"


def test_a_token_that_is_ill_formed_by_itself_is_never_allowed() -> None:
    rules = Utf8Rules([b"", b"a", b"x\xed\xa0\x80", b"\xa0", b"\x90\x80", b"\xed\x9f"], 1)
    expected = {0: 0b111011, ord("a"): 0b111011, 0xED: 0b110011, 0xE0: 0b101011, 0xF0: 0b111011}
    for last_byte, allowed in expected.items():
        words = np.full(1, -1, dtype=np.int32)
        rules.forbid(words, last_byte)
        assert int(words[0]) & 0b111111 == allowed, hex(last_byte)
