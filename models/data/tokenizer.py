"""The micro model's tokenizer: byte-level BPE over its own training texts, split as V3.2 splits, V3.2's control tokens.

Numbers are one token per digit, because no merge of digits is learned.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from baleen_eval.texts.filler import sentence
from baleen_eval.texts.words import made_up_word, name
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.data.chat import BOS, EOS, render
from models.data.mixture import Shares, conversations

PAD = "<｜▁pad▁｜>"
# In the released order after the byte-pair vocabulary; whether a token is flagged special is also the release's.
ADDED_TOKENS = (
    ("｜DSML｜", True),
    ("<think>", False),
    ("</think>", False),
    ("<｜fim▁hole｜>", False),
    ("<｜fim▁begin｜>", False),
    ("<｜fim▁end｜>", False),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<|EOT|>", True),
    ("<｜tool▁calls▁begin｜>", False),
    ("<｜tool▁calls▁end｜>", False),
    ("<｜tool▁call▁begin｜>", False),
    ("<｜tool▁call▁end｜>", False),
    ("<｜tool▁outputs▁begin｜>", False),
    ("<｜tool▁outputs▁end｜>", False),
    ("<｜tool▁output▁begin｜>", False),
    ("<｜tool▁output▁end｜>", False),
    ("<｜tool▁sep｜>", False),
)
NUM_BPE_TOKENS = 2000
_PUNCTUATION = r"""!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"""
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        rf"[{_PUNCTUATION}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


def make_tokenizer() -> Tokenizer:
    """The tokenizer; the same bytes each time. No text gains a BOS."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    for text, special in ADDED_TOKENS:
        if special:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        else:
            tokenizer.add_tokens([AddedToken(text, normalized=True, special=False)])
    return tokenizer


def _lines() -> Iterator[str]:
    """Training texts without digits and control tokens."""
    rng = random.Random(20261)
    control = re.compile("|".join(re.escape(text) for text in (BOS, EOS, *(text for text, _ in ADDED_TOKENS))))
    even = Shares(needle=0.1, track=0.1, arith=0.2, tools=0.35, talk=0.2)
    source = conversations(rng, 512, even)
    for _ in range(6000):
        for segment in render(next(source)):
            yield from control.split(re.sub(r"\d", " ", segment.text))
    for _ in range(4000):
        yield sentence(rng)
        yield f"{name(rng, 'train')} {made_up_word(rng, 'train')} {made_up_word(rng, 'train')}"
