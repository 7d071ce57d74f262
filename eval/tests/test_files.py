"""The files of published evaluations, as their owners write them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from baleen_eval.errors import UsageError
from baleen_eval.files import read_aime, read_gpqa, read_gsm8k
from baleen_eval.question import Answer

GPQA = {
    "Question": "Which one?\nSee above.",
    "Correct Answer": "right",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "two",
    "Incorrect Answer 3": "three",
    "High-level domain": "Physics",
}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_gsm8k_shows_the_first_and_asks_the_rest(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"so {n}\n#### 1,00{n}"} for n in range(5)]
    path = write_lines(tmp_path / "f.jsonl", *rows)
    questions = read_gsm8k(path, num=2, shots=2)
    assert [question.expected for question in questions] == ["1002", "1003"]
    text = questions[0].messages[0].content
    assert text.startswith("Question: q0\nAnswer: so 0\n#### 1,000\n\nQuestion: q1\n")
    assert text.endswith("Question: q2\nAnswer:")
    assert questions[1].grade(Answer("It is 7. #### 1003"))
    assert not questions[1].grade(Answer("It is 1003. #### 7"))
    with pytest.raises(UsageError, match="too few to show 5"):
        read_gsm8k(path, num=None, shots=5)
    with pytest.raises(UsageError, match=r"question 1 of .* ends on '#### number'"):
        read_gsm8k(write_lines(tmp_path / "g.jsonl", {"question": "q", "answer": "5"}), num=None, shots=0)


def test_gpqa_orders_its_choices_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(GPQA))
        writer.writeheader()
        writer.writerows([GPQA] * 20)
    questions = read_gpqa(path, num=None, seed=1)
    assert [q.messages for q in questions] == [q.messages for q in read_gpqa(path, num=None, seed=1)]
    assert [q.expected for q in questions] != [q.expected for q in read_gpqa(path, num=None, seed=2)]
    assert {q.expected for q in questions} == set("ABCD")
    for question in questions:
        assert f"{question.expected}) right" in question.messages[0].content
        assert "Which one?\nSee above.\n\nA) " in question.messages[0].content
        assert question.bucket == "Physics"
        assert question.grade(Answer(f"Answer: {question.expected}"))
        assert not question.grade(Answer("Answer: X"))
    lines = read_gpqa(write_lines(tmp_path / "f.jsonl", GPQA), num=None, seed=1)
    assert lines[0].messages == questions[0].messages
    with pytest.raises(UsageError, match="'Correct Answer'"):
        read_gpqa(write_lines(tmp_path / "g.jsonl", {"Question": "q"}), num=None, seed=1)


def test_aime_takes_either_spelling(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "073"}, {"question": "q", "expected_answer": 204}]
    first, second = read_aime(write_lines(tmp_path / "f.jsonl", *rows), num=None)
    assert first.grade(Answer(r"\boxed{73}"))
    assert second.grade(Answer(r"\boxed{3} then \boxed{204}"))
    assert not second.grade(Answer(r"\boxed{204} then \boxed{3}"))
    with pytest.raises(UsageError, match="holds no number"):
        read_aime(write_lines(tmp_path / "g.jsonl", {"problem": "p", "answer": "x"}), num=None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "holds no question"), ("[1]\n", "line 1 is not a JSON object"), ("{\n", "line 1 is not JSON")],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=sentence):
        read_aime(path, num=None)
