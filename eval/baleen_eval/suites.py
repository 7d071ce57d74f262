"""The suites by name: which questions each asks, and how many tokens an answer may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baleen_eval.errors import UsageError
from baleen_eval.files import read_aime, read_gpqa, read_gsm8k
from baleen_eval.question import Question, last_number, same_calls
from baleen_eval.texts.conversation import Conversation, dumps
from baleen_eval.texts.examples import LENGTHS, examples

_DEFAULT_NUM = 100
# Lengths of the invariance suite: within the selection of most sparse models, and beyond it.
_INVARIANCE_LENGTHS = (512, 4096)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which questions of a suite. num None: all of a file, else 100. shots None: the suite's own habit."""

    seed: int = 0
    num: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    shots: int | None = None
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """questions: makes them, UsageError where it cannot. max_tokens: of one answer, reasoning included."""

    about: str
    questions: Callable[[Choice], list[Question]]
    max_tokens: int
    reads_file: bool = False
    compares: bool = False


def choose(name: str) -> Suite:
    """The suite of that name; UsageError lists them."""
    if name not in SUITES:
        raise UsageError(f"there is no suite {name!r}; the suites are {', '.join(SUITES)}")
    return SUITES[name]


def _generated(name: str) -> Callable[[Choice], list[Question]]:
    def questions(choice: Choice) -> list[Question]:
        num = _DEFAULT_NUM if choice.num is None else choice.num
        drawn = examples(name, num, seed=choice.seed, lengths=choice.lengths, num_shots=choice.shots)
        return [question_from(conversation) for conversation in drawn]

    return questions


def question_from(conversation: Conversation) -> Question:
    """Asks for the first turn of the assistant. Calls have to match exactly; otherwise the last number has to."""
    place = next(i for i, message in enumerate(conversation.messages) if message.role == "assistant")
    expected = conversation.messages[place]
    if expected.calls:
        count = len(expected.calls)
        return Question(
            messages=conversation.messages[:place],
            expected=" ".join(f"{call.name}({dumps(call.arguments)})" for call in expected.calls),
            grade=lambda answer: same_calls(answer, expected.calls),
            bucket="1 call" if count == 1 else f"{count} calls",
            thinking=conversation.thinking,
        )
    number = last_number(expected.content)
    mode = "thinking" if conversation.thinking else "chat"
    return Question(
        messages=conversation.messages[:place],
        expected=expected.content,
        grade=lambda answer: last_number(answer.content) == number,
        bucket=str(conversation.info.get("length", mode)),
        depth=conversation.info.get("depth"),
        thinking=conversation.thinking,
    )


def _arith(choice: Choice) -> list[Question]:
    return _generated("arith")(choice) if choice.data is None else _gsm8k(choice)


def _gsm8k(choice: Choice) -> list[Question]:
    return read_gsm8k(_file(choice, "gsm8k"), num=choice.num, shots=8 if choice.shots is None else choice.shots)


def _gpqa(choice: Choice) -> list[Question]:
    return read_gpqa(_file(choice, "gpqa"), num=choice.num, seed=choice.seed)


def _aime(choice: Choice) -> list[Question]:
    return read_aime(_file(choice, "aime"), num=choice.num)


def _file(choice: Choice, suite: str) -> Path:
    if choice.data is None:
        raise UsageError(f"--suite {suite} reads its questions from a file: name it with --data")
    return choice.data


def _invariance(choice: Choice) -> list[Question]:
    """A fifth each of short and long look-ups, problems, calls and chains; graded by comparing, not by themselves."""
    num = _DEFAULT_NUM if choice.num is None else choice.num
    kinds = ("needle", "arith", "tools", "track")
    questions: list[Question] = []
    for place, kind in enumerate(kinds):
        share = num // len(kinds) + (place < num % len(kinds))
        drawn = examples(kind, share, seed=choice.seed, lengths=_INVARIANCE_LENGTHS)
        for conversation in drawn:
            question = question_from(conversation)
            questions.append(
                Question(question.messages, question.expected, question.grade, kind, None, question.thinking)
            )
    return questions


SUITES = {
    "needle": Suite("facts about names in a long text, by length and depth", _generated("needle"), 256),
    "track": Suite("chains of assignments in a long text, by length", _generated("track"), 256),
    "arith": Suite("word problems; with --data those of a gsm8k file", _arith, 512),
    "tools": Suite("tool calls, names and arguments exact", _generated("tools"), 512),
    "gsm8k": Suite("grade-school problems from a gsm8k JSONL file", _gsm8k, 2048, reads_file=True),
    "gpqa": Suite("multiple-choice questions from a gpqa CSV or JSONL file", _gpqa, 32768, reads_file=True),
    "aime": Suite("competition problems from an aime JSONL file", _aime, 65536, reads_file=True),
    "invariance": Suite("greedy answers of two servers, or of one twice, are equal", _invariance, 256, compares=True),
}
