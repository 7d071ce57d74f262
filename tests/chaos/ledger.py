"""What happened, a JSON object a line, in the order in which it was learnt: clients, faults and looks at the stack.

Written while the stack runs and judged afterwards (see checker.py), so that a verdict can be had again from the file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO


class Ledger:
    """Appends records to a file. Each has `at`, seconds since the ledger was opened, and `kind`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        self._file: TextIO = path.open("w", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> float:
        """Returns the record's time."""
        at = round(time.monotonic() - self._began, 4)
        self._file.write(f"{json.dumps({'at': at, 'kind': kind, **fields})}\n")
        return at

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Every record of a ledger."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
