"""Asks all questions, several at a time, and keeps what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baleen_eval.client import Client, Sampling
from baleen_eval.errors import TransportError
from baleen_eval.question import Answer, Question


@dataclass(frozen=True, slots=True)
class Outcome:
    """`correct` is None where the question got no answer; `error` says why. got: the answer as shown to people."""

    question: Question
    correct: bool | None
    got: str = ""
    error: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


Asker = Callable[[Question, int], Awaitable[Outcome]]


def grader(client: Client, model: str, sampling: Sampling) -> Asker:
    """Judges each answer by the question's own rule."""

    async def ask(question: Question, seed: int) -> Outcome:
        try:
            answer = await client.ask(model, question, sampling, seed=seed)
        except TransportError as error:
            return Outcome(question, None, error=str(error))
        return _outcome(question, answer, correct=question.grade(answer), got=answer.shown())

    return ask


def comparer(first: Client, second: Client, models: tuple[str, str], sampling: Sampling) -> Asker:
    """Right is an answer that both servers give alike: reasoning, content, calls, end and number of tokens."""

    async def ask(question: Question, seed: int) -> Outcome:
        try:
            one = await first.ask(models[0], question, sampling, seed=seed)
            other = await second.ask(models[1], question, sampling, seed=seed)
        except TransportError as error:
            return Outcome(question, None, error=str(error))
        got = one.shown() if one == other else f"{one!r} versus {other!r}"
        return _outcome(question, one, correct=one == other, got=got)

    return ask


def _outcome(question: Question, answer: Answer, *, correct: bool, got: str) -> Outcome:
    return Outcome(
        question=question,
        correct=correct,
        got=got,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
    )


async def ask_all(
    questions: Sequence[Question], ask: Asker, *, seed: int, repeat: int, parallel: int, on_done: Callable[[], object]
) -> list[Outcome]:
    """The outcomes in the order of the questions, `repeat` rounds of them, at most `parallel` at a time.

    Each round samples with a seed of its own. `on_done` is called after each.
    """
    work = [(question, seed + number) for number in range(repeat) for question in questions]
    outcomes: list[Outcome | None] = [None] * len(work)
    places = iter(range(len(work)))

    async def worker() -> None:
        for place in places:  # shared: each place is taken once
            outcomes[place] = await ask(*work[place])
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, len(work))):
            group.create_task(worker())
    return [outcome for outcome in outcomes if outcome is not None]
