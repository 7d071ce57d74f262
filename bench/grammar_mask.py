"""What a constraint costs the step loop: the mask of the next token, for each constrained request and step.

Real answers are fed through real grammars over a real vocabulary (the micro model's, or that of a folder given with
`--model`). Times are CPU time of the thread that would turn the engine, so that other work on the machine does not
count. Masks that the engine has made in another thread, because they are slow, are listed apart: they cost the loop
nothing and their request waits for them. Compile times are those of the rank; the trial before it takes as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))

from baleen_worker.grammar.backend import Backend
from baleen_worker.grammar.guide import Guide
from baleen_worker.request import Constraint
from report import ROOT, Bar, write
from tokenizers import Tokenizer

LIMIT_US = 50.0
EOS = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "town": {"type": "string"}},
            "required": ["street", "town"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
CODE = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 10}}, "required": ["code"]}
ADDRESS = '{"street": "12 Harbour Road", "town": "Nantucket"}'
# name -> (constraint, an answer that matches it)
CASES: dict[str, tuple[Constraint, str]] = {
    "object": (
        Constraint("json_schema", json.dumps(PERSON)),
        f'{{"name": "Captain Ahab", "age": 58, "tags": ["whale", "sea captain"], "address": {ADDRESS}}}',
    ),
    "any object": (
        Constraint("json_schema", '{"type": "object"}'),
        '{"title": "Moby Dick", "year": 1851, "read": true, "chapters": [1, 2, {"name": "Loomings"}]}',
    ),
    "enumeration": (Constraint("json_schema", '{"enum": ["plankton", "krill", "copepods"]}'), '"copepods"'),
    "regex": (Constraint("regex", r"(yes|no), because [a-z ]+\."), "yes, because the whale is white."),
    "counted string": (Constraint("json_schema", json.dumps(CODE)), '{"code": "AB12 CD34"}'),
}


def measure(backend: Backend, tokenizer: Tokenizer, case: str, repeats: int) -> dict[str, Any]:
    """Microseconds a token of one case: the committed token is taken in and the next mask is ready to be sent."""
    constraint, answer = CASES[case]
    began_s = time.process_time()
    grammar = backend.compile(constraint)
    compile_ms = (time.process_time() - began_s) * 1000
    token_ids = [*tokenizer.encode(answer, add_special_tokens=False).ids, EOS]
    times_us: list[float] = []
    for _ in range(repeats):
        guide = Guide(backend.match(grammar, (EOS,)), stop_ids=(EOS,))
        for token_id in token_ids[:-1]:
            began_s = time.thread_time()
            guide.advance(token_id)
            mask = guide.mask()
            times_us.append((time.thread_time() - began_s) * 1e6)
            if not mask:
                raise RuntimeError(f"{case}: every token is allowed")
    cuts = statistics.quantiles(times_us, n=100)
    return {
        "tokens": len(token_ids),
        "compile_cpu_ms": round(compile_ms, 1),
        "grammar_bytes": grammar.memory_size_bytes,
        "mean_us": round(statistics.fmean(times_us), 1),
        "median_us": round(statistics.median(times_us), 1),
        "p99_us": round(cuts[98], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/micro", help="folder with the vocabulary")
    parser.add_argument("--repeats", type=int, default=40, help="answers a case (default %(default)s)")
    arguments = parser.parse_args()
    vocab_size: int = json.loads((arguments.model / "config.json").read_text("utf-8"))["vocab_size"]
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    began_s = time.process_time()
    backend = Backend(arguments.model, vocab_size, 1)
    vocabulary_ms = (time.process_time() - began_s) * 1000
    cases = {case: measure(backend, tokenizer, case, arguments.repeats) for case in CASES}
    write(
        f"grammar_mask_{vocab_size}",
        {"vocab_size": vocab_size, "read_vocabulary_cpu_ms": round(vocabulary_ms, 1), "cases": cases},
        [
            Bar(f"mask of a request-step, {case}, {vocab_size} tokens", found["mean_us"], LIMIT_US, "us")
            for case, found in cases.items()
        ],
    )


if __name__ == "__main__":
    main()
