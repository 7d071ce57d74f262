"""Writes the inputs that fuzzing starts from, one a file: the outputs and conversations in ../tests/data, and what
earlier fuzzing has found worth keeping, in seeds/.

    python seeds.py [--keep]

`--keep` goes the other way: it writes the corpora, as `cargo fuzz cmin` leaves them, to seeds/. For the least of them
let `cmin` look at places alone: `cargo fuzz cmin TARGET -- -use_counters=0`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "tests" / "data"
# What is kept of a corpus: enough to reach every place again, in a file that is still looked through.
MAX_KEPT = 128
MAX_KEPT_BYTES = 160


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a file of JSON lines."""
    return map(json.loads, (DATA / name).read_text("utf-8").splitlines())


def outputs(dialects: tuple[int, ...]) -> Iterator[bytes]:
    """Recorded outputs behind their two bytes of settings: thinking as it was, each division, each of `dialects`."""
    for number, row in enumerate(rows("dsml/parse.jsonl")):
        thinking = row["thinking_mode"] == "thinking"
        for dialect in dialects:
            yield bytes([thinking | dialect, number]) + row["raw_text"].encode()


def requests() -> Iterator[bytes]:
    """Recorded conversations as request bodies."""
    for row in rows("dsml/encode.jsonl"):
        body = row.get("request") or {"messages": row["messages"], "max_tokens": 16, "stream": True}
        yield json.dumps(body, ensure_ascii=False).encode()


def kept(target: str) -> Iterator[bytes]:
    """Inputs of seeds/TARGET.hex: a line each, the shortest first."""
    yield from map(bytes.fromhex, (HERE / "seeds" / f"{target}.hex").read_text("ascii").split())


def keep(target: str, known: set[bytes]) -> None:
    """Writes seeds/TARGET.hex: of what the corpus holds beside what is made of ../tests/data, short inputs, as many of
    each length as there is room for."""
    inputs = {path.read_bytes() for path in (HERE / "corpus" / target).iterdir()} - known
    short = sorted((data for data in inputs if 0 < len(data) <= MAX_KEPT_BYTES), key=lambda data: (len(data), data))
    every = -(-len(short) // MAX_KEPT)
    text = "".join(f"{data.hex()}\n" for data in short[::every])
    (HERE / "seeds" / f"{target}.hex").write_text(text, "ascii")


def main() -> None:
    """Adds to each target's corpus; what is there stays."""
    # For dsml bits 3 and 4 are the dialect; for sse bit 2 reads calls, bit 3 hides special tokens, bit 5 adds a stop.
    seeds = {"dsml": outputs((0, 8, 16)), "sse": outputs((4, 8, 0x2C)), "chat_json": requests()}
    for target, inputs in seeds.items():
        if sys.argv[1:] == ["--keep"]:
            keep(target, set(inputs))
            continue
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for data in [*inputs, *kept(target)]:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main()
