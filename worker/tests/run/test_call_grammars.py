"""The grammars that the gateway compiles from tools: the worker admits the outputs it should, and no others.

The rows are those that the gateway's own tests compile. An output is tokenized as the model writes it, control tokens
by their ids.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baleen_worker.grammar.backend import Backend
from baleen_worker.request import Constraint
from tokenizers import Tokenizer

CHECKOUT = Path(__file__).resolve().parents[3]
ROWS = [
    json.loads(line)
    for line in (CHECKOUT / "gateway/tests/data/constraints.jsonl").read_text(encoding="utf-8").splitlines()
]
MICRO_MODEL = CHECKOUT / "models/micro"
TOKENIZER_JSON = MICRO_MODEL / "tokenizer.json"
END_OF_SENTENCE = 1


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_JSON))


@cache
def control_tokens() -> dict[str, int]:
    added = json.loads(TOKENIZER_JSON.read_text(encoding="utf-8"))["added_tokens"]
    return {token["content"]: token["id"] for token in added}


@cache
def backend() -> Backend:
    config = json.loads((MICRO_MODEL / "config.json").read_text(encoding="utf-8"))
    return Backend(MICRO_MODEL, config["vocab_size"], num_threads=1)


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
    grammar = backend().compile(Constraint("structural_tag", json.dumps(tag), None))
    matcher = backend().match(grammar, [END_OF_SENTENCE])
    for number in [*ids, END_OF_SENTENCE]:
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        if not bits[number] or not matcher.accept(number):
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
