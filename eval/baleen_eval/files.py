"""Reads the question files of published evaluations, which their owners distribute: gsm8k, gpqa and aime."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baleen_eval.errors import UsageError
from baleen_eval.question import Question, final_letter, final_number
from baleen_eval.texts.conversation import Message

_LETTERS = "ABCD"


def read_gsm8k(path: Path, *, num: int | None, shots: int) -> list[Question]:
    """JSONL with `question` and `answer`, which ends on `#### number`. The first `shots` are shown solved before each
    of the following `num` (None: all). UsageError where the file does not hold that.
    """
    rows = _json_lines(path)
    solved = [_gsm8k_text(path, line, row) for line, row in enumerate(rows, 1)]
    if shots >= len(rows):
        raise UsageError(f"{path} has {len(rows)} problems: too few to show {shots} solved ones and ask for others")
    prefix = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in solved[:shots])
    questions: list[Question] = []
    for question, answer in solved[shots:][:num]:
        number = final_number(answer)
        questions.append(
            Question(
                messages=(Message("user", f"{prefix}Question: {question}\nAnswer:"),),
                expected=str(number),
                grade=lambda given, number=number: final_number(given.content) == number,
                thinking=False,
            )
        )
    return questions


def _gsm8k_text(path: Path, line: int, row: dict[str, Any]) -> tuple[str, str]:
    question, answer = _field(path, line, row, ("question",)), _field(path, line, row, ("answer",))
    if "####" not in answer or final_number(answer) is None:
        raise UsageError(
            f"question {line} of {path}: the answer of a gsm8k problem ends on '#### number', this one does not"
        )
    return question, answer


def read_gpqa(path: Path, *, num: int | None, seed: int) -> list[Question]:
    """CSV or JSONL with the columns Question, Correct Answer and Incorrect Answer 1 to 3; choices shuffled by seed and
    place. UsageError where the file does not hold that.
    """
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_lines(path)
    questions: list[Question] = []
    for line, row in enumerate(rows[:num], 1):
        right = _field(path, line, row, ("Correct Answer",))
        wrong = [_field(path, line, row, (f"Incorrect Answer {number}",)) for number in (1, 2, 3)]
        choices = [right, *wrong]
        order = random.Random(f"gpqa {seed} {line}").sample(range(4), 4)
        letter = _LETTERS[order.index(0)]
        listed = "\n".join(f"{name}) {choices[which].strip()}" for name, which in zip(_LETTERS, order, strict=True))
        text = (
            "Answer the multiple-choice question. End with a line 'Answer: X', where X is A, B, C or D.\n\n"
            f"{_field(path, line, row, ('Question',)).strip()}\n\n{listed}"
        )
        questions.append(
            Question(
                messages=(Message("user", text),),
                expected=letter,
                grade=lambda given, letter=letter: final_letter(given.content) == letter,
                bucket=str(row.get("High-level domain") or "all"),
                thinking=True,
            )
        )
    return questions


def read_aime(path: Path, *, num: int | None) -> list[Question]:
    """JSONL with `problem` (or `question`) and an integer `answer` (or `expected_answer`). UsageError as above."""
    questions: list[Question] = []
    for line, row in enumerate(_json_lines(path)[:num], 1):
        problem = _field(path, line, row, ("problem", "question"))
        number = final_number(_field(path, line, row, ("answer", "expected_answer")))
        if number is None:
            raise UsageError(f"question {line} of {path}: the answer holds no number")
        text = f"Solve the problem and put the final answer, an integer, into \\boxed{{}}.\n\n{problem}"
        questions.append(
            Question(
                messages=(Message("user", text),),
                expected=str(number),
                grade=lambda given, number=number: final_number(given.content) == number,
                thinking=True,
            )
        )
    return questions


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {path} is not text in UTF-8: byte {error.start} is not") from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number} is not a JSON object")
        rows.append(row)
    return _not_empty(path, rows)


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = list(csv.DictReader(_read(path).splitlines(keepends=True), strict=True))
    except csv.Error as error:
        raise UsageError(f"{path} is not CSV: {error}") from error
    return _not_empty(path, rows)


def _not_empty(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        raise UsageError(f"--data {path} holds no question")
    return rows


def _field(path: Path, line: int, row: dict[str, Any], names: Sequence[str]) -> str:
    """The first of the named fields as text; numbers are taken as written."""
    for name in names:
        value = row.get(name)
        if isinstance(value, (str, int, float)) and str(value).strip():
            return str(value)
    raise UsageError(f"question {line} of {path} has no field {' or '.join(map(repr, names))} with a text")
