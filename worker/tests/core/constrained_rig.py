"""Constrained answers in process: the micro model's vocabulary, real grammars, and a judge of what came out."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from baleen_worker.grammar.backend import Backend, GrammarError
from baleen_worker.grammar.guide import TokenMatcher
from baleen_worker.grammar.room import RefusedError
from baleen_worker.request import Constraint
from baleen_worker.vocabulary import read_token_bytes

MICRO = Path(__file__).resolve().parents[3] / "models/micro"
VOCAB_SIZE = 2048
EOS = 1


class DirectCompiler:
    """The room's compiler without the trial in another process, which has tests of its own."""

    def __init__(self) -> None:
        self._backend = backend()

    def compile(self, constraint: Constraint) -> Any:
        try:
            return self._backend.compile(constraint)
        except GrammarError as error:
            raise RefusedError(str(error)) from None

    def match(self, grammar: Any, stop_ids: Sequence[int]) -> TokenMatcher:
        return self._backend.match(grammar, stop_ids)

    def close(self) -> None:
        """Has started nothing."""


@cache
def backend() -> Backend:
    return Backend(MICRO, VOCAB_SIZE, 1)


@cache
def _token_bytes() -> list[bytes]:
    return read_token_bytes(MICRO, VOCAB_SIZE)


def text_of(token_ids: Sequence[int]) -> str:
    """The text of an answer without its end mark. Raises when it is not UTF-8."""
    return b"".join(_token_bytes()[token_id] for token_id in token_ids).decode()


def check_json(token_ids: Sequence[int], schema: Any) -> None:
    """An answer that ended by itself is JSON and matches its schema."""
    assert token_ids[-1] == EOS
    jsonschema.validate(json.loads(text_of(token_ids)), schema, cls=jsonschema.Draft202012Validator)


def draw_schema(g: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema whose answers are short, whatever chooses the tokens."""
    kinds = ["string", "integer", "boolean", "enum", "null", "number"] + ["object", "array", "anyOf"] * (depth > 0)
    match g.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": g.randint(0, 6)}
        case "integer":
            low = g.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + g.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": g.randint(1, 9)}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": g.sample(["krill", "Wal", "鯨", 'a"b\\c', 7, -2.5, None, True, ""], g.randint(1, 4))}
        case "object":
            names = g.sample(["a", "name", "länge", "x-y", "items", 'q"uote'], g.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: draw_schema(g, depth - 1) for name in names},
                "required": [name for name in names if g.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            low = g.randint(0, 2)
            items = draw_schema(g, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + g.randint(0, 2)}
        case _:
            return {"anyOf": [draw_schema(g, depth - 1) for _ in range(g.randint(1, 3))]}
