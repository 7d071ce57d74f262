"""What a seed gives is frozen: the tokenizer was learned from these texts, and published results name seeds."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict

import pytest
from baleen_eval.texts.arith import arith
from baleen_eval.texts.examples import examples

DIGESTS = {
    "needle": "b34df801d438fe07",
    "track": "de3e9c4dbe3f9bd3",
    "arith": "76f2beb8f7a01b7f",
    "tools": "e697b521a29966be",
    "copy": "649a69eebffc9966",
    "sort": "78743fc4f1b3ddbe",
    "talk": "166785d39c4f6d0b",
}


@pytest.mark.parametrize("suite", DIGESTS)
def test_what_a_seed_gives_never_changes(suite: str) -> None:
    drawn = [asdict(conversation) for conversation in examples(suite, 5, seed=7, lengths=(512, 2048))]
    text = json.dumps(drawn, ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[suite]


def test_solved_problems_come_first_as_asked() -> None:
    for shots in (0, 3):
        conversation = arith(random.Random(1), "eval", num_shots=shots)
        asked = conversation.messages[0].content
        assert asked.count("The answer is") == shots
        assert asked.count("Question:") == (shots + 1 if shots else asked.count("Question:"))
