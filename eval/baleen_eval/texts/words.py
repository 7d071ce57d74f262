"""Names, made-up words and numbers, each split for good between training and evaluation.

The split is by a hash of the word or a residue of the number, so it holds whatever the seed: no name, word or code
that evaluation asks for has ever been in a training text.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

Split = Literal["train", "eval"]

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "dr", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
_SHARES = 8  # one share in eight is evaluation's


def is_eval(text: str) -> bool:
    """Whether a word or name belongs to evaluation."""
    return zlib.crc32(text.lower().encode()) % _SHARES == 0


def made_up_word(rng: random.Random, split: Split) -> str:
    """Three syllables that mean nothing, in lower case."""
    while True:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(3))
        if is_eval(word) == (split == "eval"):
            return word


def name(rng: random.Random, split: Split) -> str:
    """A made-up word with a capital."""
    return made_up_word(rng, split).capitalize()


def distinct_names(rng: random.Random, split: Split, count: int) -> list[str]:
    """`count` different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[name(rng, split)] = None
    return list(names)


def key(rng: random.Random, split: Split) -> str:
    """What a fact is about: a name, two of them, or two words with a hyphen."""
    draw = rng.random()
    if draw < 0.7:
        return name(rng, split)
    if draw < 0.85:
        return f"{name(rng, split)} {name(rng, split)}"
    return f"{made_up_word(rng, split)}-{made_up_word(rng, split)}"


def code(rng: random.Random, split: Split) -> int:
    """A number, mostly of four digits: evaluation's are those that leave 3 when divided by 7."""
    while True:
        number = rng.randint(1000, 9999) if rng.random() < 0.8 else rng.randint(100, 999_999)
        if (number % 7 == 3) == (split == "eval"):
            return number
