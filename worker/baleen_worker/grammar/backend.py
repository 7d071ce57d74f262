"""xgrammar over one model's vocabulary: the only file that speaks its language.

Control tokens stand for no text here: a grammar gets one only where a structural tag asks for it by id, so that text
which looks like a mark is never taken for one. Imported lazily, because xgrammar brings torch and seconds of import.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar

from baleen_worker.grammar.utf8 import Utf8Rules
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
# A string of bounded length, as the library spells it: a rule for one character, and references that count. It lets
# such a string hold control characters, which JSON forbids, and a mask takes hundreds of times as long as one of an
# automaton that counts. Up to a bound of 128 the library makes such an automaton, at 55 ms of compilation a character
# in the released vocabulary and 1 ms in one of 2,048 tokens; beyond, it counts at run time, and masks are slow again.
_LOOSE_CHARACTER = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_STRICT_CLASS = r'[^\x00-\x1f"\\]'

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (?:Check failed: .*? is false: )?")


class GrammarError(ValueError):
    """A constraint that cannot be compiled; the message says why."""


class Backend:
    """Compiles constraints against one vocabulary."""

    def __init__(self, model_dir: Path, vocab_size: int, num_threads: int) -> None:
        """Reads the model's tokenizer; raises ValueError when it is not understood."""
        token_bytes = read_token_bytes(model_dir, vocab_size)
        self._utf8 = Utf8Rules(token_bytes, -(-vocab_size // 32))
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
                    return self._compiler.compile_grammar(_regex_rule("root", _without_line_breaks(source)))
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
        return Matcher(grammar, stop_ids, self.vocab_size, self._utf8)


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, stop_ids: Sequence[int], vocab_size: int, utf8: Utf8Rules
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(stop_ids))
        self._words = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)
        self._clear_placeholder = _PLACEHOLDER_STOP_ID not in stop_ids
        self._utf8 = utf8
        self._last_byte = 0

    def accept(self, token_id: int) -> bool:
        """Moves past a token; False when the grammar does not allow it here."""
        self._last_byte = self._utf8.last_byte(token_id)
        return self._matcher.accept_token(token_id)

    def allowed(self) -> NDArray[np.int32]:
        """Which tokens may come next, as `PlannedRow.mask` packs them; the next call overwrites it.

        Other threads run meanwhile.
        """
        words = self._words
        # The stub knows torch tensors only; anything that speaks DLPack is taken.
        bitmask: Any = words
        self._matcher.fill_next_token_bitmask(bitmask)
        if self._clear_placeholder:  # within counted repetitions the library allows it, and then refuses it
            words[0, 0] &= ~(1 << _PLACEHOLDER_STOP_ID)
        self._utf8.forbid(words[0], self._last_byte)
        return words[0]


def _strict(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """The same with strings of bounded length as automata, and without control characters in them."""
    text = str(grammar)
    names = _LOOSE_CHARACTER.findall(text)
    if not names:
        return grammar
    rules: dict[str, str] = {}

    def counted(match: re.Match[str]) -> str:
        name, least, most = match.groups()
        most = "" if most == "-1" else most
        rule = f"{name}_{least}_{most or 'more'}"
        rules[rule] = _regex_rule(rule, f"{_STRICT_CLASS}{{{least},{most}}}")
        return rule

    text = _LOOSE_CHARACTER.sub(lambda match: _regex_rule(match[1], _STRICT_CLASS), text)
    text = re.sub(rf"\b({'|'.join(names)})\{{(\d+), (-?\d+)\}}", counted, text)
    return xgrammar.Grammar.from_ebnf("\n".join([text, *rules.values()]))


def _regex_rule(name: str, pattern: str) -> str:
    """A rule that is an automaton of its own: states, where the library's own expansion makes rules and counts."""
    return f"{name} ::= Regex({json.dumps(pattern, ensure_ascii=False)})"


def _without_line_breaks(pattern: str) -> str:
    """A dot matches no line break, as everywhere; the library lets it match any character."""
    parts = re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    return "".join(r"[^\n\r]" if part == "." else part for part in parts)


def _cause(error: Exception) -> str:
    """The library's sentence without the place in its sources."""
    return " ".join(_LOG_PREFIX.sub("", str(error)).split())[:500] or type(error).__name__
