"""Arithmetic word problems with the reasoning in the thinking part.

A problem is evaluation's when the hash of its numbers says so: the numbers themselves are known from training, their
combination is not. Names are from the split's own.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from baleen_eval.texts.conversation import Conversation, Message
from baleen_eval.texts.words import Split, distinct_names

_ITEMS = ("apples", "books", "coins", "shells", "stamps", "pencils", "cards", "stones", "eggs", "letters")
Problem = tuple[str, list[str], int]


def _gain_loss(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x, y = rng.randint(2, 99), rng.randint(2, 99)
    z = rng.randint(1, x + y - 1)
    text = f"{a} has {x} {item}. {a} buys {y} more and then gives {z} to {b}. How many {item} does {a} have now?"
    return text, [f"{x} + {y} = {x + y}.", f"{x + y} - {z} = {x + y - z}."], x + y - z


def _loss_gain(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x = rng.randint(3, 99)
    y, z = rng.randint(1, x - 1), rng.randint(2, 99)
    text = f"{a} has {x} {item}. {a} gives {y} to {b} and then finds {z} more. How many {item} does {a} have now?"
    return text, [f"{x} - {y} = {x - y}.", f"{x - y} + {z} = {x - y + z}."], x - y + z


def _boxes(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x, y, z = rng.randint(2, 9), rng.randint(2, 12), rng.randint(2, 99)
    text = f"{a} has {x} boxes with {y} {item} in each. {b} brings {z} more. How many {item} are there in total?"
    return text, [f"{x} * {y} = {x * y}.", f"{x * y} + {z} = {x * y + z}."], x * y + z


def _shop(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x, y = rng.randint(2, 9), rng.randint(2, 10)
    z = rng.randint(x * y, 99) if x * y < 99 else 99
    text = (
        f"{b} sells {item} for {y} coins each. {a} buys {x} and pays with {z} coins. How many coins does {a} get back?"
    )
    return text, [f"{x} * {y} = {x * y}.", f"{z} - {x * y} = {z - x * y}."], z - x * y


def _together(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x, y = rng.randint(2, 60), rng.randint(2, 39)
    text = f"{a} has {x} {item}. {b} has {y} more than {a}. How many {item} do they have together?"
    return text, [f"{x} + {y} = {x + y}.", f"{x} + {x + y} = {x + x + y}."], x + x + y


def _one_step(rng: random.Random, a: str, b: str, item: str) -> Problem:
    x, y = rng.randint(2, 99), rng.randint(2, 99)
    if rng.random() < 0.5:
        text = f"{a} has {x} {item} and {b} has {y}. How many {item} do they have together?"
        return text, [f"{x} + {y} = {x + y}."], x + y
    x, y = max(x, y) + 1, min(x, y)
    text = f"{a} has {x} {item} and loses {y}. How many {item} does {a} have now?"
    return text, [f"{x} - {y} = {x - y}."], x - y


def _bare(rng: random.Random, a: str, b: str, item: str) -> Problem:
    _, steps, result = _one_step(rng, a, b, item)
    return f"What is {steps[0].split(' =')[0]}?", steps, result


TWO_STEP: tuple[Callable[[random.Random, str, str, str], Problem], ...] = (
    _gain_loss,
    _loss_gain,
    _boxes,
    _shop,
    _together,
)


_ASK = ("{}", "{}", "{}", "Question: {}", "{} Think step by step.", "Solve this problem: {}")


def arith(rng: random.Random, split: Split, *, num_steps: int = 2, num_shots: int | None = None) -> Conversation:
    """A word problem, with `num_shots` solved ones before it; None: with one to four in a fifth of all cases.

    Two of three are in thinking mode, where the steps are the reasoning; in chat mode they stand in the answer.
    """
    thinking = rng.random() < 0.67
    text, steps, result = _problem(rng, split, num_steps)
    answer = f"The answer is {result}."
    if num_shots is None:
        num_shots = rng.randint(1, 4) if rng.random() < 0.2 else 0
    if num_shots:
        shots: list[str] = []
        for _ in range(num_shots):
            solved, solved_steps, solution = _problem(rng, split, num_steps)
            shots.append(f"Question: {solved}\nAnswer: {' '.join(solved_steps)} The answer is {solution}.\n\n")
        question = "".join(shots) + f"Question: {text}\nAnswer:"
    else:
        question = rng.choice(_ASK).format(text)
    content = answer if thinking else f"{' '.join(steps)} {answer}"
    messages = (Message("user", question), Message("assistant", content, reasoning=" ".join(steps)))
    return Conversation(messages, thinking=thinking, info={"suite": "arith"})


def _problem(rng: random.Random, split: Split, num_steps: int) -> Problem:
    makers = TWO_STEP if num_steps == 2 else (_one_step, _bare)
    while True:
        a, b = distinct_names(rng, split, 2)
        text, steps, result = rng.choice(makers)(rng, a, b, rng.choice(_ITEMS))
        if (zlib.crc32(" ".join(steps).encode()) % 8 == 0) == (split == "eval"):
            return text, steps, result
