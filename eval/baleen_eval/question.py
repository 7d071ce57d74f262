"""A question with its known answer, and how a model's answer to it is judged. Knows nothing of HTTP or files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from baleen_eval.texts.conversation import Call, Message

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# What marks the final number of a solution, the strongest mark first.
_MARKED_NUMBER = (
    re.compile(rf"####\s*\$?({_NUMBER.pattern})"),
    re.compile(rf"\\boxed\{{\s*\$?({_NUMBER.pattern})"),
    re.compile(rf"answer is[:\s*$]*({_NUMBER.pattern})", re.IGNORECASE),
)
_MARKED_LETTER = re.compile(r"(?:answer(?: is)?\s*[:=]?|\\boxed)[\s*$({\\a-z]*([A-D])\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model gave back. `calls` are (name, arguments as JSON text)."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def shown(self) -> str:
        """The answer in one line of text, for a list of mistakes."""
        calls = " ".join(f"{name}({arguments})" for name, arguments in self.calls)
        return " ".join(part for part in (self.content, calls) if part)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, what is expected, and `grade`, which says whether an answer is right.

    bucket: what the table of results groups by. depth: share of the text before the fact that is asked for, or None.
    thinking: whether the model is to think; None leaves it to the server.
    """

    messages: tuple[Message, ...]
    expected: str
    grade: Callable[[Answer], bool]
    bucket: str = "all"
    depth: float | None = None
    thinking: bool | None = None


def last_number(text: str) -> Decimal | None:
    """The last number of a text; commas between digits are left out."""
    found = _NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def final_number(text: str) -> Decimal | None:
    """The number that a solution marks as its result (`#### 7`, a box, "the answer is 7"), else its last number.

    Of several with the strongest mark the last one counts in a box, and the first one otherwise: a model that goes on
    to the next problem has answered this one already.
    """
    for pattern in _MARKED_NUMBER:
        found = pattern.findall(text)
        if found:
            return _decimal(found[-1] if "boxed" in pattern.pattern else found[0])
    return last_number(text)


def final_letter(text: str) -> str | None:
    """The choice A to D that an answer ends on."""
    found = _MARKED_LETTER.findall(text)
    return found[-1].upper() if found else None


def same_calls(answer: Answer, expected: tuple[Call, ...]) -> bool:
    """Whether names, order and arguments are those expected; 1, 1.0 and true are three different values."""
    return [_canonical(*call) for call in answer.calls] == [
        _canonical(call.name, json.dumps(call.arguments)) for call in expected
    ]


def _canonical(name: str, arguments: str) -> tuple[str, str]:
    try:
        return name, json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return name, arguments


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))
