"""Constraints that ask too much of a compiler: depth, breadth, recursion, bounds, and plain nonsense."""

from __future__ import annotations

import json
import random


def _nested(kind: str, depth: int) -> str:
    head, tail = {
        "object": ('{"type":"object","properties":{"a":', "}}"),
        "array": ('{"type":"array","items":', "}"),
        "anyOf": ('{"anyOf":[{"type":"null"},', "]}"),
    }[kind]
    return head * depth + '{"type":"integer"}' + tail * depth


def _schemas(g: random.Random) -> list[str]:
    many = g.choice([200, 600, 1000])
    large = 10 ** g.randint(4, 9)
    schemas = [
        {"type": "string", "maxLength": large},
        {"type": "string", "minLength": large, "maxLength": large + 5},
        {"type": "array", "items": {"type": "string", "maxLength": 1000}, "minItems": large, "maxItems": 2 * large},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(many)}},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(many // 3)}, "minProperties": 50},
        {"enum": [f"value {g.random()}" for _ in range(many)]},
        {"enum": ["x" * large for large in (10_000, 20_000)]},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": g.randint(2, 9)},
        {"$ref": f"#/$defs/missing{many}"},
        {"type": "string", "pattern": "^(" + "|".join("ab" * g.randint(1, 9) for _ in range(50)) + "){1,60}$"},
        {"type": "object", "patternProperties": {f"^{c}+{i}.*$": {"type": "null"} for i in range(20) for c in "abc"}},
        {"type": "integer", "minimum": -(10**17) - many, "maximum": 10**17 + many},
        {"type": "integer", "minimum": large, "maximum": large - 1},
        {"type": "number", "minimum": 10**40},
        {"type": many},
        {"anyOf": [{"type": "object", "properties": {f"q{i}": {"$ref": "#"}}} for i in range(100)]},
    ]
    return [json.dumps(schema) for schema in schemas]


def _regexes(g: random.Random) -> list[str]:
    count = g.randint(50, 900)
    return [
        "(a+)+$",
        "(a|a)*b" * g.randint(1, 20),
        f"(a{{1,{count}}}){{1,{count}}}",
        f".{{1,{count * 50}}}",
        f"(.*a){{{count // 10}}}",
        "(" * count * 10 + "a" + ")" * count * 10,
        "|".join(f"w{g.random()}" for _ in range(count)),
        r"(a)\1",
        "(?=a)b",
        f"[{'a-z' * count}",
        r"[^\s\S]",
    ]


def _grammars(g: random.Random) -> list[str]:
    count = g.randint(500, 1500)
    rules = "\n".join(f'r{i} ::= "a" r{i + 1} | r{i + 1}' for i in range(count))
    doubling = "\n".join(f"d{i} ::= d{i + 1} d{i + 1}" for i in range(40))
    return [
        f'root ::= r0\n{rules}\nr{count} ::= "b"',
        f'root ::= d0\n{doubling}\nd40 ::= "b"',
        "root ::= root",
        f'root ::= root root | "{count}" | ""',
        "root ::= " + "(" * count * 10 + '"a"' + ")" * count * 10,
        f"root ::= missing{count}",
        f'root ::= "unfinished {count}',
        f'root ::= ("a"{{1,{count}}}){{1,{count}}}',
    ]


def hostile_constraints(count: int) -> list[tuple[str, str]]:
    """(kind, source) pairs, the same at every call, none larger than the contract allows."""
    g = random.Random(9)
    found: list[tuple[str, str]] = [("json_schema", _nested("object", 500)), ("regex", "(a"), ("ebnf", "root ::= root")]
    while len(found) < count:
        depth = g.choice([40, 300, 900])
        found += [("json_schema", _nested(kind, depth)) for kind in ("object", "array", "anyOf")]
        found += [("json_schema", source) for source in _schemas(g)]
        found += [("regex", source) for source in _regexes(g)]
        found += [("ebnf", source) for source in _grammars(g)]
        found += [("structural_tag", "{}"), ("structural_tag", '{"type":"structural_tag","format":{"type":"x"}}')]
        found = [(kind, source) for kind, source in found if len(source.encode()) <= 65536]
    g.shuffle(found)
    return found[:count]
