"""Writes the inputs that fuzzing starts from, one a file, made of the outputs and conversations in ../tests/data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "tests" / "data"


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


def main() -> None:
    """Adds to each target's corpus; what is there stays."""
    # For dsml bits 3 and 4 are the dialect; for sse bit 2 reads calls, bit 3 hides special tokens, bit 5 adds a stop.
    seeds = {"dsml": outputs((0, 8, 16)), "sse": outputs((4, 8, 0x2C)), "chat_json": requests()}
    for target, inputs in seeds.items():
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for data in inputs:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main()
