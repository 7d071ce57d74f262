"""xgrammar over one model's vocabulary: the only file that speaks its language.

Control tokens stand for no text here: a grammar gets one only where a structural tag asks for it by id, so that text
which looks like a mark is never taken for one. Imported lazily, because xgrammar brings torch and seconds of import.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar

from baleen_worker.vocabulary import read_control_tokens, read_token_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from baleen_worker.request import Constraint

# Stands for a control token: no UTF-8, so that no text of a grammar matches it, yet not empty, which would make the
# library leave the token out wherever it stands.
_CONTROL = b"\xff%d"
# A control token; see `Matcher.allowed`.
_PLACEHOLDER_STOP_ID = 0
# The library lets a string of bounded length hold control characters, which JSON forbids.
_LOOSE_CLASS = r"[^\"\\\r\n]"
_STRICT_CLASS = r"[^\0-\x1f\"\\]"

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Check failed: .*? is false: )?")


class GrammarError(ValueError):
    """A constraint that cannot be compiled; the message says why."""


class Backend:
    """Compiles constraints against one vocabulary."""

    def __init__(self, model_dir: Path, vocab_size: int, num_threads: int) -> None:
        """Reads the model's tokenizer; raises ValueError when it is not understood."""
        token_bytes = read_token_bytes(model_dir, vocab_size)
        for token_id in read_control_tokens(model_dir).values():
            if token_id < vocab_size:
                token_bytes[token_id] = _CONTROL % token_id
        # Every request brings stop tokens of its own, but the library insists on some here.
        self._vocabulary = xgrammar.TokenizerInfo(
            token_bytes, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[_PLACEHOLDER_STOP_ID]
        )
        self._compiler = xgrammar.GrammarCompiler(self._vocabulary, max_threads=num_threads, cache_enabled=False)
        self.vocab_size = vocab_size

    def compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        """The grammar of a constraint. Raises GrammarError."""
        source = constraint.source
        try:
            match constraint.kind:
                case "json_schema":
                    # One style of white space, that of Python's json: no model can run on in it, masks take half.
                    grammar = xgrammar.Grammar.from_json_schema(source, any_whitespace=False)
                    return self._compiler.compile_grammar(_strict(grammar))
                case "regex":
                    return self._compiler.compile_regex(_without_line_breaks(source))
                case "ebnf":
                    return self._compiler.compile_grammar(source)
                case "structural_tag":
                    return self._compiler.compile_grammar(_strict(xgrammar.Grammar.from_structural_tag(source)))
                case kind:
                    raise AssertionError(f"a constraint of unknown kind {kind}")
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_cause(error)) from error

    def match(self, grammar: xgrammar.CompiledGrammar, stop_ids: Sequence[int]) -> Matcher:
        """A matcher at the grammar's beginning, which may be left by the stop tokens alone."""
        return Matcher(grammar, stop_ids, self.vocab_size)


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, stop_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(stop_ids))
        self._num_words = -(-vocab_size // 32)
        self._clear_placeholder = _PLACEHOLDER_STOP_ID not in stop_ids

    def accept(self, token_id: int) -> bool:
        """Moves past a token; False when the grammar does not allow it here."""
        return self._matcher.accept_token(token_id)

    def allowed(self) -> NDArray[np.int32]:
        """Which tokens may come next, as `PlannedRow.mask` packs them. Other threads run meanwhile."""
        words = np.empty((1, self._num_words), dtype=np.int32)
        # The stub knows torch tensors only; anything that speaks DLPack is taken.
        bitmask: Any = words
        self._matcher.fill_next_token_bitmask(bitmask)
        if self._clear_placeholder:  # within counted repetitions the library allows it, and then refuses it
            words[0, 0] &= ~(1 << _PLACEHOLDER_STOP_ID)
        return words[0]


def _strict(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """The same without control characters in strings of bounded length."""
    text = str(grammar)
    if _LOOSE_CLASS not in text:
        return grammar
    return xgrammar.Grammar.from_ebnf(text.replace(_LOOSE_CLASS, _STRICT_CLASS))


def _without_line_breaks(pattern: str) -> str:
    """A dot matches no line break, as everywhere; the library lets it match any character."""
    parts = re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    return "".join(r"[^\n\r]" if part == "." else part for part in parts)


def _cause(error: Exception) -> str:
    """The library's sentence without the place in its sources."""
    return " ".join(_LOG_PREFIX.sub("", str(error)).split())[:500] or type(error).__name__
