"""Text from which the micro model's tokenizer learns its merges: sentences, numbers, JSON and code, all made here.

The words are common ones and the sentences come from patterns, so the text is ours to ship and needs no download.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

_SUBJECTS = (
    "the whale", "a small boat", "the harbour", "my neighbour", "the librarian", "an old engineer", "the weather",
    "every student", "the river", "our train", "the gardener", "a quiet street", "the lighthouse", "her brother",
    "the computer", "a long letter", "the mountain", "this recipe", "the orchestra", "the museum", "someone", "nobody",
)  # fmt: skip
_VERBS = (
    "reads", "carries", "follows", "remembers", "opens", "answers", "measures", "repairs", "paints", "watches",
    "describes", "finds", "builds", "explains", "forgets", "counts", "collects", "returns", "crosses", "understands",
)  # fmt: skip
_OBJECTS = (
    "the morning light", "a wooden table", "three letters", "the question", "a red bicycle", "the northern coast",
    "an empty page", "the first chapter", "some warm bread", "the missing key", "a difficult problem", "the garden",
    "a simple answer", "the whole story", "a map of the city", "the weather report", "an important meeting", "music",
)  # fmt: skip
_TAILS = (
    "before the rain begins", "because it is late", "while everyone is asleep", "in the afternoon", "without a word",
    "when the bell rings", "as quickly as possible", "for the second time", "near the old bridge", "with great care",
    "although nobody asked", "until the evening", "in about twenty minutes", "on the other side of the river",
)  # fmt: skip
_CHAT = (
    "Hello! How can I help you today?", "Thank you, that is very kind.", "I am not sure, but I think so.",
    "Could you say that again, please?", "Let me think about this step by step.", "First, we add the two numbers.",
    "Then we multiply the result.", "So the answer is", "What is the capital of", "Please write a short summary of",
    "You are a helpful assistant.", "I'm sorry, I don't know.", "It's a good question; let's see what we've got.",
)  # fmt: skip
_NAMES = ("get_weather", "search", "send_message", "convert_units", "list_files", "book_table", "translate")
_KEYS = ("city", "date", "query", "limit", "unit", "message", "path", "language", "value", "enabled", "type", "name")


def lines(num_lines: int, *, seed: int = 0) -> Iterator[str]:
    """Yields `num_lines` lines of mixed text; the same for the same arguments."""
    rng = random.Random(seed)
    kinds = (_sentence, _sentence, _sentence, _dialogue, _arithmetic, _record, _code)
    for _ in range(num_lines):
        yield rng.choice(kinds)(rng)


def _sentence(rng: random.Random) -> str:
    text = f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {rng.choice(_TAILS)}"
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "!", "?", "…"))


def _dialogue(rng: random.Random) -> str:
    return " ".join(rng.sample(_CHAT, 2)) + rng.choice(("", "\n", "\n\n"))


def _arithmetic(rng: random.Random) -> str:
    a, b = rng.randint(1, 999), rng.randint(1, 999)
    operator, result = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return f"{a} {operator} {b} = {result}. The total costs ${result / 100:.2f}, or {rng.randint(1, 100)}% of it."


def _record(rng: random.Random) -> str:
    arguments = {
        key: rng.choice((rng.randint(0, 50), rng.random() < 0.5, rng.choice(_OBJECTS), None))
        for key in rng.sample(_KEYS, 3)
    }
    return json.dumps({"name": rng.choice(_NAMES), "arguments": arguments}, indent=rng.choice((None, 2)))


def _code(rng: random.Random) -> str:
    name, key = rng.choice(_NAMES), rng.choice(_KEYS)
    return (
        f"def {name}({key}: str) -> str:\n    return self.{name}_{key}[{rng.randint(0, 9)}]  # {rng.choice(_OBJECTS)}\n"
    )
