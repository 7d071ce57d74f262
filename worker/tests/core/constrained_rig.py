"""Constrained answers in process: a real vocabulary, real grammars, an engine, and a judge of what came out."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.engine import Engine
from baleen_worker.fake_runner import FakeRunner
from baleen_worker.grammar.backend import Backend, GrammarError
from baleen_worker.grammar.guide import TokenMatcher
from baleen_worker.grammar.room import GrammarRoom, RefusedError
from baleen_worker.messages import Submit
from baleen_worker.output import RequestError
from baleen_worker.request import Constraint, FinishReason, Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import BuiltRunner
from baleen_worker.vocabulary import read_token_bytes
from engine_rig import Lines

MICRO = Path(__file__).resolve().parents[3] / "models/micro"
VOCAB_SIZE = 2048
EOS = 1
NUM_PAGES = 513


@dataclass(frozen=True)
class Vocabulary:
    """Of a model folder: its size, and the id that ends an answer."""

    folder: Path
    size: int
    eos: int

    @property
    def backend(self) -> Backend:
        return _backend(self)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of an answer without its end mark. Raises when it is not UTF-8."""
        spelled = _token_bytes(self)
        return b"".join(spelled[token_id] for token_id in token_ids).decode()

    def check_json(self, token_ids: Sequence[int], schema: Any) -> None:
        """An answer that ended by itself is JSON and matches its schema."""
        assert token_ids[-1] == self.eos
        value = json.loads(self.text_of(token_ids[:-1]))
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


MICRO_VOCABULARY = Vocabulary(MICRO, VOCAB_SIZE, EOS)


@cache
def _backend(vocabulary: Vocabulary) -> Backend:
    return Backend(vocabulary.folder, vocabulary.size, 1)


@cache
def _token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    return read_token_bytes(vocabulary.folder, vocabulary.size)


def text_of(token_ids: Sequence[int]) -> str:
    """See `Vocabulary`."""
    return MICRO_VOCABULARY.text_of(token_ids)


def check_json(token_ids: Sequence[int], schema: Any) -> None:
    """See `Vocabulary`."""
    MICRO_VOCABULARY.check_json(token_ids, schema)


class DirectCompiler:
    """The room's compiler without the trial in another process, which has tests of its own."""

    def __init__(self, vocabulary: Vocabulary = MICRO_VOCABULARY) -> None:
        self._backend = vocabulary.backend

    def compile(self, constraint: Constraint) -> Any:
        try:
            return self._backend.compile(constraint)
        except GrammarError as error:
            raise RefusedError(str(error)) from None

    def match(self, grammar: Any, stop_ids: Sequence[int]) -> TokenMatcher:
        return self._backend.match(grammar, stop_ids)

    def close(self) -> None:
        """Has started nothing."""


class Answers:
    """An engine with a room, and what it has said to each key."""

    def __init__(
        self,
        *,
        num_pages: int = NUM_PAGES,
        depth: int = 1,
        vocabulary: Vocabulary = MICRO_VOCABULARY,
        built: BuiltRunner | None = None,
    ) -> None:
        """On the fake runner, unless one was built, whose number of pages counts then."""
        self.lines = Lines()
        if built is None:
            runner = FakeRunner(num_pages, vocabulary.size, avoid_ids=(vocabulary.eos,))
            pages = PagePool(num_pages, on_free=runner.poison)
        else:
            runner, pages = built.runner, PagePool(built.num_pages, on_free=built.poison)
        # Grossly optimistic, so that few pages mean many preemptions.
        limits = SchedulerLimits(32, 256, 5000, conservativeness=0.01)
        self.scheduler = Scheduler(limits, pages, PrefixCache(pages))
        self.room = GrammarRoom(lambda: DirectCompiler(vocabulary), cache_bytes=64 << 20)
        self.engine = Engine(self.scheduler, runner, self.lines, self.lines, room=self.room, depth=depth)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason | RequestError] = {}

    def ask(self, *requests: Request) -> None:
        self.lines.commands.append(Submit(list(requests)))
        self.tokens |= {request.id[1]: [] for request in requests}

    def turn(self) -> None:
        self.engine.turn()
        for step in self.lines.steps():
            for columns in step.streams:
                start = 0
                for key, count, reason in zip(columns.keys, columns.token_counts, columns.finish_reasons, strict=True):
                    assert key not in self.ends
                    self.tokens[key] += columns.token_ids[start : start + count]
                    start += count
                    if reason:
                        self.ends[key] = FinishReason(reason)
                self.ends |= dict(columns.errors)

    def finish(self) -> None:
        while len(self.ends) < len(self.tokens):
            self.turn()
            if not self.scheduler.idle or not len(self.room):
                continue
            self.room.wait(0.01)
        assert self.scheduler.idle


def make_request(
    key: int, constraint: Constraint | None, *, max_tokens: int = 400, prompt: Sequence[int] = (2,), **fields: Any
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=key, stop_token_ids=(EOS,), **fields)
    return Request((1, key), [*prompt, 3 + key % (VOCAB_SIZE - 3)], sampling, constraint=constraint)


def schema_constraint(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


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
