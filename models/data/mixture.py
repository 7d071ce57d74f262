"""The training mixture: which tasks, how long, and how documents fill the rows of a batch."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from baleen_eval.texts.arith import arith
from baleen_eval.texts.conversation import Conversation
from baleen_eval.texts.retrieval import copy, needle, sort, track
from baleen_eval.texts.talk import talk
from baleen_eval.texts.tools import tools

from models.data.chat import render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPT_WEIGHT = 0.05  # of a token that the model is only given; its own words weigh 1
_PIECES = re.compile(r"(?<=[.?!])(?= [A-Z])")
_CACHE_SIZE = 200_000


@dataclass(frozen=True, slots=True)
class Shares:
    """How many of the tokens each task gets; the rest, up to 1, is split evenly between copying and sorting."""

    needle: float = 0.34
    track: float = 0.2
    arith: float = 0.16
    tools: float = 0.2
    talk: float = 0.06


class Encoder:
    """Conversation -> token ids and loss weights. Sentences are remembered, because haystacks repeat them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """The ids of a text; cutting it between sentences changes none, since the tokenizer splits there anyway."""
        out: list[int] = []
        for piece in _PIECES.split(text):
            known = self._known.get(piece)
            if known is None:
                if len(self._known) >= _CACHE_SIZE:
                    self._known.clear()
                known = self._known[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            out += known
        return out

    def __call__(self, conversation: Conversation) -> tuple[list[int], list[float]]:
        """Ids, and for each the weight of predicting it."""
        ids: list[int] = []
        weights: list[float] = []
        for segment in render(conversation):
            piece = self.ids(segment.text)
            ids += piece
            weights += [1.0 if segment.learned else PROMPT_WEIGHT] * len(piece)
        return ids, weights


def conversations(rng: random.Random, row_len: int, shares: Shares) -> Iterator[Conversation]:
    """Training conversations without end. `row_len` bounds the long ones."""
    spent = dict.fromkeys(("needle", "track", "arith", "tools", "talk", "lists"), 0.0)
    wanted = {key: getattr(shares, key, 0.0) for key in spent}
    wanted["lists"] = 1.0 - sum(wanted.values())
    while True:
        kind = min(spent, key=lambda key: spent[key] / wanted[key])
        conversation = _one(rng, kind, row_len)
        spent[kind] += sum(len(message.content) + 30 for message in conversation.messages)
        if kind == "tools":
            spent[kind] += 1500
        yield conversation


def _one(rng: random.Random, kind: str, row_len: int) -> Conversation:
    if kind in ("needle", "track"):
        # Short texts as often as long ones, on a logarithmic scale.
        length = int(64 * (max(row_len - 200, 128) / 64) ** rng.random())
        make = needle if kind == "needle" else track
        return make(rng, "train", length, num_questions=rng.randint(1, 2 + length // 128))
    if kind == "arith":
        return arith(rng, "train", num_steps=2 if rng.random() < 0.7 else 1)
    if kind == "tools":
        return tools(rng, "train", num_turns=rng.randint(1, 4))
    if kind == "talk":
        return talk(rng, "train")
    return copy(rng, "train") if rng.random() < 0.5 else sort(rng, "train")


def rows(
    tokenizer: Tokenizer, *, seed: int, row_len: int, shares: Shares | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of `row_len + 1` ids (int64) and weights (float32): conversations end to end, the last one cut off."""
    rng = random.Random(seed)
    encode = Encoder(tokenizer)
    source = conversations(rng, row_len, shares or Shares())
    while True:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= row_len:
            more_ids, more_weights = encode(next(source))
            ids += more_ids
            weights += more_weights
        yield np.array(ids[: row_len + 1], np.int64), np.array(weights[: row_len + 1], np.float32)
