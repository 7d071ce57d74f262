"""Plain sentences that say nothing in particular: the haystack of long texts, and the tokenizer's source of English.

The words are common ones and the sentences come from patterns, so the text is ours to ship and needs no download.
"""

from __future__ import annotations

import random

SUBJECTS = (
    "the whale", "a small boat", "the harbour", "my neighbour", "the librarian", "an old engineer", "the weather",
    "every student", "the river", "our train", "the gardener", "a quiet street", "the lighthouse", "her brother",
    "the computer", "a long letter", "the mountain", "this recipe", "the orchestra", "the museum", "someone", "nobody",
    "the baker", "a tired doctor", "the captain", "his sister", "the forest", "that window", "a blue bird",
    "the market",
)  # fmt: skip
VERBS = (
    "reads", "carries", "follows", "remembers", "opens", "answers", "measures", "repairs", "paints", "watches",
    "describes", "finds", "builds", "explains", "forgets", "counts", "collects", "returns", "crosses", "understands",
)  # fmt: skip
OBJECTS = (
    "the morning light", "a wooden table", "three letters", "the question", "a red bicycle", "the northern coast",
    "an empty page", "the first chapter", "some warm bread", "the missing key", "a difficult problem", "the garden",
    "a simple answer", "the whole story", "a map of the city", "the weather report", "an important meeting", "music",
    "a cup of tea", "the green door", "an early train", "the last song", "a heavy box", "the open sea",
)  # fmt: skip
TAILS = (
    "before the rain begins", "because it is late", "while everyone is asleep", "in the afternoon", "without a word",
    "when the bell rings", "as quickly as possible", "for the second time", "near the old bridge", "with great care",
    "although nobody asked", "until the evening", "in about twenty minutes", "on the other side of the river",
)  # fmt: skip


def sentence(rng: random.Random) -> str:
    """One sentence with its full stop."""
    words = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}"
    if rng.random() < 0.5:
        words += " " + rng.choice(TAILS)
    return words[0].upper() + words[1:] + "."


def haystack(rng: random.Random, facts: list[str], num_sentences: int, places: list[float] | None = None) -> str:
    """`num_sentences` sentences with the facts between them, at random places or at the given shares of the text."""
    lines = [sentence(rng) for _ in range(num_sentences)]
    if places is None:
        spots = [rng.randint(0, num_sentences) for _ in facts]
    else:
        spots = [round(place * num_sentences) for place in places]
    for spot, fact in sorted(zip(spots, facts, strict=True), key=lambda pair: -pair[0]):
        lines.insert(spot, fact)
    return " ".join(lines)
