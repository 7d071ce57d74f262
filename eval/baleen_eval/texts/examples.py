"""Evaluation's conversations: which ones a suite and a seed mean. Every number that was published rests on these."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

from baleen_eval.texts.arith import arith
from baleen_eval.texts.conversation import Conversation
from baleen_eval.texts.retrieval import copy, needle, sort, track
from baleen_eval.texts.talk import talk
from baleen_eval.texts.tools import tools

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
NUM_DEPTHS = 10


def examples(
    suite: str, num: int, *, seed: int, lengths: tuple[int, ...] = LENGTHS, num_shots: int | None = None
) -> Iterator[Conversation]:
    """`num` conversations of a suite (for needle and track: of each length), drawn from evaluation's words and numbers.

    A length is the prompt's, about, in tokens of the micro model. `num_shots` is arith's; see there.
    """
    rng = random.Random(f"{suite} {seed}")
    if suite in ("needle", "track"):
        for length in lengths:
            for number in range(num):
                room = length * 24 // 25 - 120
                if suite == "needle":
                    depth = (number % NUM_DEPTHS) / (NUM_DEPTHS - 1)
                    yield _labelled(needle(rng, "eval", room, depth=depth), length)
                else:
                    yield _labelled(track(rng, "eval", room), length)
        return
    makers: dict[str, Callable[[random.Random], Conversation]] = {
        "arith": lambda rng: arith(rng, "eval", num_shots=num_shots),
        "tools": lambda rng: tools(rng, "eval"),
        "copy": lambda rng: copy(rng, "eval"),
        "sort": lambda rng: sort(rng, "eval"),
        "talk": lambda rng: talk(rng, "eval"),
    }
    for _ in range(num):
        yield makers[suite](rng)


def _labelled(conversation: Conversation, length: int) -> Conversation:
    return dataclasses.replace(conversation, info={**conversation.info, "length": length})
