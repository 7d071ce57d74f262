"""Reads JSON files of a model folder key by key, with types, and collects everything that is wrong with them.

Owns the wording of what is wrong; which keys a file must have is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast


class CheckpointError(ValueError):
    """A model folder that cannot be served. The message is for the operator: what is wrong, where, and what to do."""


class JsonKeys:
    """The keys of one JSON file, read with their types. Collects what is wrong instead of stopping at the first."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix
        self._missing: list[str] = []
        self._problems: list[str] = []

    def section(self, key: str, values: Mapping[str, object]) -> JsonKeys:
        """The keys of an object inside this one; what is wrong with them is reported together with the rest."""
        inner = JsonKeys(self.path, values, f"{self._prefix}{key}.")
        inner._missing, inner._problems = self._missing, self._problems
        return inner

    def problem(self, key: str, sentence: str) -> None:
        """Notes what is wrong with a key, with its value."""
        self._problems.append(f"{self._prefix}{key} {sentence} (it is {shown(self.values.get(key))})")

    def raise_if_bad(self) -> None:
        """Raises CheckpointError if anything was noted."""
        parts: list[str] = []
        if self._missing:
            parts.append(
                f"missing {'keys' if len(self._missing) > 1 else 'key'} {', '.join(dict.fromkeys(self._missing))}"
            )
        parts += self._problems
        if parts:
            hint = "use the config.json that was published with the checkpoint" if self._missing else None
            raise CheckpointError(f"{self.path}: {'; '.join(parts)}" + (f"; {hint}" if hint else ""))

    def count(self, key: str, *, minimum: int = 1) -> int:
        """A whole number that must be there."""
        value = self.values.get(key)
        if value is None:
            self._missing.append(self._prefix + key)
            return minimum
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.problem(key, f"must be a whole number of at least {minimum}")
            return minimum
        return value

    def optional_count(self, key: str, default: int, *, minimum: int = 1) -> int:
        """A whole number, `default` where absent or null."""
        return default if self.values.get(key) is None else self.count(key, minimum=minimum)

    def count_or_null(self, key: str) -> int | None:
        """A whole number or null; the key must be there."""
        if key in self.values and self.values[key] is None:
            return None
        return self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, `default` where absent or null."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                self._missing.append(self._prefix + key)
            return 1.0 if default is None else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            self.problem(key, "must be a number, zero or above")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false, `default` where absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, "must be true or false")
        return default if not isinstance(value, bool) else value

    def fixed(self, key: str, expected: object) -> None:
        """A key that has one supported value."""
        value = self.values.get(key)
        if value is not None and value != expected:
            self.problem(key, f"is not supported: only {shown(expected)} is")

    def token_ids(self, key: str) -> list[int]:
        """One token id or a list of them; empty where absent or null."""
        value = self.values.get(key)
        if value is None:
            return []
        listed = cast("list[object]", value) if isinstance(value, list) else [value]
        ids = [item for item in listed if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
        if len(ids) != len(listed):
            self.problem(key, "must be a token id or a list of token ids")
            return [0]
        return ids

    def object(self, key: str) -> Mapping[str, object] | None:
        """A JSON object, None where absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.problem(key, "must be an object")
            return None
        return cast("Mapping[str, object] | None", value)


def read_bytes(path: Path) -> bytes:
    """The whole file. Raises CheckpointError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: a model folder holds config.json, tokenizer.json and safetensors files"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def parse_object(path: Path, raw: bytes) -> Mapping[str, object]:
    """The file's JSON object. Raises CheckpointError."""
    try:
        values = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy the file again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return cast("Mapping[str, object]", values)


def shown(value: object) -> str:
    """A value as the file would spell it."""
    return json.dumps(value, ensure_ascii=False, default=str)
