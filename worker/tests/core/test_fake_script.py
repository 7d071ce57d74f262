"""Scripts of the fake runner: which answer a prompt gets, and what is said about a script that cannot be played."""

from __future__ import annotations

from pathlib import Path

import pytest
from baleen_worker.fake_runner import FakeRunner, expected_tokens
from baleen_worker.fake_script import FakeScript, Scene
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, PlannedRow, StepPlan

VOCAB_SIZE = 1000


def script(*scenes: tuple[list[int], list[int]]) -> FakeScript:
    return FakeScript([Scene(tuple(cue), tuple(answer)) for cue, answer in scenes])


def play(answers: FakeScript, prompt: list[int], chunk: int, num_tokens: int) -> list[int]:
    """The runner's output for a prompt fed `chunk` tokens at a time."""
    runner = FakeRunner(num_pages=8, vocab_size=VOCAB_SIZE, script=answers)
    admissions = [Admission(0, SamplingParams(max_tokens=num_tokens, seed=0))]
    pages = list(range(1, 4))
    output: list[int] = []
    known = list(prompt)
    start = 0
    while len(output) < num_tokens:
        fed = known[start : start + chunk]
        samples = start + len(fed) == len(known)
        row = PlannedRow(0, start, fed, 0, pages, samples, len(output))
        step = runner.launch(StepPlan(1, admissions, [row])).collect()
        assert not step.errors
        admissions = []
        output += step.token_ids[0]
        known = prompt + output
        start += len(fed)
    return output


def test_the_cue_that_stands_last_decides() -> None:
    answers = script(([1, 2], [10]), ([3], [20]), ([2, 3], [30]))
    assert answers.answer_to([1, 2, 9]) == (10,)
    assert answers.answer_to([3, 1, 2]) == (10,)
    assert answers.answer_to([1, 2, 3, 9]) == (30,), "of two cues with one end the longer counts"
    assert answers.answer_to([2, 9, 3]) == (20,)
    assert answers.answer_to([1, 9, 2]) is None


@pytest.mark.parametrize("chunk", [1, 64, 200])
def test_an_answer_is_replayed_and_then_the_runner_goes_on_by_itself(chunk: int) -> None:
    prompt = [*range(100, 170), 1, 2, 5]
    output = play(script(([1, 2], [7, 7, 8])), prompt, chunk, 5)
    assert output[:3] == [7, 7, 8]
    assert output != expected_tokens(prompt, 5, VOCAB_SIZE)


def test_a_prompt_without_a_cue_is_answered_as_ever() -> None:
    prompt = list(range(100, 170))
    assert play(script(([1, 2], [7])), prompt, 64, 4) == expected_tokens(prompt, 4, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 2: JSON is malformed"),
        ('{"cue": [1]}', "line 2: Object missing required field `answer`"),
        ('{"cue": [1], "answer": ["a"]}', "line 2: Expected `int`"),
        ('{"cue": [1], "answer": [2], "then": []}', "unknown field `then`"),
        ('{"cue": [], "answer": [2]}', "line 2: cue and answer need at least one id"),
        ('{"cue": [1], "answer": [1000]}', "line 2: id 1000 is not in the vocabulary of 1000"),
        ('{"cue": [-1], "answer": [1]}', "line 2: id -1 is not in the vocabulary"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused_by_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f'{{"cue": [1], "answer": [2]}}\n{line}\n', "utf-8")
    with pytest.raises(ValueError, match=says):
        FakeScript.load(path, VOCAB_SIZE)


def test_a_script_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.jsonl cannot be read: No such file"):
        FakeScript.load(tmp_path / "absent.jsonl", VOCAB_SIZE)
