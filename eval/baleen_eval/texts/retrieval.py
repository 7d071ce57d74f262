"""Tasks that look things up in a long text: needles, chains of variables, copying and sorting."""

from __future__ import annotations

import random

from baleen_eval.texts.conversation import Conversation, Message
from baleen_eval.texts.filler import haystack
from baleen_eval.texts.words import Split, code, distinct_names, key, made_up_word

KINDS = ("code", "number", "key", "price", "age")
_TOKENS_PER_SENTENCE = 9
_TOKENS_PER_FACT = 12
_INTRODUCTIONS = ("", "", "Read the text and answer the question.\n\n", "Remember what follows.\n\n", "Text: ")
_SYSTEM = ("", "", "", "You are a helpful assistant.", "Answer from the text.")
_FACTS = ("The {0} of {1} is {2}.",) * 9 + ("{1} has the {0} {2}.",)
_QUESTIONS = (
    *("What is the {0} of {1}?",) * 6,
    "Tell me the {0} of {1}.",
    "What {0} does {1} have?",
    "Which {0} belongs to {1}?",
    "Question: What is the {0} of {1}?",
)


def needle(
    rng: random.Random,
    split: Split,
    num_tokens: int,
    *,
    num_questions: int = 1,
    depth: float | None = None,
    num_needles: int | None = None,
) -> Conversation:
    """A text of about `num_tokens` tokens with facts about names in it, and questions about some of them.

    `depth` in 0..1 says where the fact asked for stands; None is anywhere.
    """
    if num_needles is None:
        most = max(2, num_tokens // 60)
        num_needles = rng.randint(min(num_questions, most), most)
    names = list(dict.fromkeys(key(rng, split) for _ in range(num_needles)))
    kind = rng.choice(KINDS)
    kinds = [kind if rng.random() < 0.8 else rng.choice(KINDS) for _ in names]
    values = [code(rng, split) for _ in names]
    facts = [rng.choice(_FACTS).format(*fact) for fact in zip(kinds, names, values, strict=True)]
    num_sentences = max(1, (num_tokens - len(names) * _TOKENS_PER_FACT - 25) // _TOKENS_PER_SENTENCE)
    places = None if depth is None else [depth, *(rng.random() for _ in facts[1:])]
    text = haystack(rng, facts, num_sentences, places)
    asked = [0] if depth is not None else rng.sample(range(len(names)), min(num_questions, len(names)))
    turns: list[tuple[str, str, str]] = []
    for which in asked:
        question = rng.choice(_QUESTIONS).format(kinds[which], names[which])
        thought = f"I look for the {kinds[which]} of {names[which]}."
        turns.append((question, thought, f"The {kinds[which]} of {names[which]} is {values[which]}."))
    return _about(rng, text, turns, thinking=rng.random() < 0.15, info={"suite": "needle", "depth": depth})


def _about(
    rng: random.Random, text: str, turns: list[tuple[str, str, str]], *, thinking: bool, info: dict[str, object]
) -> Conversation:
    """A conversation on a text, which comes with the first question, mostly before it."""
    system = rng.choice(_SYSTEM)
    messages = [Message("system", system)] if system else []
    for number, (question, thought, answer) in enumerate(turns):
        content = question
        if number == 0:
            text = rng.choice(_INTRODUCTIONS) + text
            content = f"{text}\n\n{question}" if rng.random() < 0.85 else f"{question}\n\n{text}"
        messages += [Message("user", content), Message("assistant", answer, reasoning=thought)]
    return Conversation(tuple(messages), thinking=thinking, info=info)


def track(rng: random.Random, split: Split, num_tokens: int, *, num_questions: int = 1) -> Conversation:
    """Assignments such as `Let Bela be Dako.` in a text; a value is found by following them, one at a time."""
    num_chains = rng.randint(1, max(1, min(12, num_tokens // 120)))
    chains = [distinct_names(rng, split, rng.randint(2, 4)) for _ in range(num_chains)]
    values = [str(code(rng, split)) for _ in chains]
    facts: list[str] = []
    for chain, value in zip(chains, values, strict=True):
        facts += [f"Let {left} be {right}." for left, right in zip(chain, [*chain[1:], value], strict=True)]
    rng.shuffle(facts)
    num_sentences = max(1, (num_tokens - len(facts) * 10 - 25) // _TOKENS_PER_SENTENCE)
    text = haystack(rng, facts, num_sentences)
    thinking = rng.random() < 0.3
    turns: list[tuple[str, str, str]] = []
    for which in rng.sample(range(num_chains), min(num_questions, num_chains)):
        start = rng.randrange(len(chains[which]) - 1)
        chain, value = chains[which][start:], values[which]
        steps = " ".join(f"Let {a} be {b}." for a, b in zip(chain, [*chain[1:], value], strict=True))
        answer = f"The value of {chain[0]} is {value}."
        # Thinking of earlier turns is not shown again, so there the steps are part of the answer only in chat mode.
        turns.append((f"What is the value of {chain[0]}?", steps, answer if thinking else f"{steps} {answer}"))
    if thinking:
        turns = turns[:1]
    return _about(rng, text, turns, thinking=thinking, info={"suite": "track"})


def copy(rng: random.Random, split: Split) -> Conversation:
    """Repeats words, numbers or both."""
    items = [
        made_up_word(rng, split) if rng.random() < 0.6 else str(code(rng, split)) for _ in range(rng.randint(2, 12))
    ]
    text = " ".join(items)
    request = rng.choice(("Repeat: {}", "Say this again: {}", "Please copy the following words: {}")).format(text)
    return Conversation((Message("user", request), Message("assistant", text)), info={"suite": "copy"})


def sort(rng: random.Random, split: Split) -> Conversation:
    """Sorts a few numbers of two digits."""
    while True:
        numbers = rng.sample(range(10, 100), rng.randint(2, 5))
        if (sum(numbers) % 7 == 3) == (split == "eval"):
            break
    request = f"Sort these numbers: {', '.join(map(str, numbers))}"
    answer = ", ".join(map(str, sorted(numbers)))
    return Conversation((Message("user", request), Message("assistant", answer)), info={"suite": "sort"})
