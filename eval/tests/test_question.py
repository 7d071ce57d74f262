"""What is read out of an answer, and what is taken for right."""

from __future__ import annotations

from decimal import Decimal

import pytest
from baleen_eval.question import Answer, final_letter, final_number, last_number, same_calls
from baleen_eval.texts.conversation import Call


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The code of Bela is 1234.", 1234),
        ("It costs $1,234,567.50, no more", "1234567.5"),
        ("from 3 to -4", -4),
        ("5.0", 5),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: object) -> None:
    assert last_number(text) == (None if number is None else Decimal(str(number)))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5\n#### 5\n\nQuestion: 7 eggs?\n#### 7", 5),
        ("The answer is 12. Check: 3 * 4.", 12),
        ("So **the answer is: $18**, paid over 3 days", 18),
        (r"First \boxed{3}, finally \boxed{042}", 42),
        (r"The answer is 7? No: \boxed{8}", 8),
        ("6 apples and 9 pears", 9),
        ("I cannot say.", None),
    ],
)
def test_final_number(text: str, number: object) -> None:
    assert final_number(text) == (None if number is None else Decimal(str(number)))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer: (B)**", "B"),
        ("The answer is A, not B. So\nAnswer: D", "D"),
        (r"\boxed{\text{A}}", "A"),
        ("Answer: Entropy", None),
        ("C", None),
    ],
)
def test_final_letter(text: str, letter: str | None) -> None:
    assert final_letter(text) == letter


def test_calls_are_equal_in_name_order_and_every_argument() -> None:
    expected = (Call("book_room", {"hour": 3, "urgent": True, "tags": ["a"]}), Call("get_file", {"name": "1"}))
    book, get = ("book_room", '{"urgent": true, "tags": ["a"], "hour": 3}'), ("get_file", '{"name": "1"}')
    assert same_calls(Answer("", calls=(book, get)), expected)
    assert not same_calls(Answer("", calls=(get, book)), expected)
    assert not same_calls(Answer("", calls=(book,)), expected)
    assert not same_calls(Answer("", calls=(book, ("get_file", '{"name": 1}'))), expected)
    for wrong in ('{"urgent": 1, "tags": ["a"], "hour": 3}', '{"urgent": true, "tags": ["a"]}', "{"):
        assert not same_calls(Answer("", calls=(("book_room", wrong), get)), expected)
