"""Keeps constrained answers well-formed UTF-8, which the grammar library takes for granted.

A character class lets it take any lead byte followed by any continuation bytes: also a surrogate, or a character
spelled longer than need be. No decoder reads those as one character, so a string could turn out longer than its
`maxLength`. Three lead bytes are to blame, each of which some second bytes may not follow (Unicode, table 3-7; 0xF4 the
library gets right). Such a pair is within one token, or parted between two.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_BARRED = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90)}
_BARRED_PAIR = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")


class Utf8Rules:
    """Which tokens of a vocabulary may not follow which byte."""

    def __init__(self, token_bytes: Sequence[bytes], num_words: int) -> None:
        """`num_words`: of a mask."""
        self._last_bytes = bytes(spelled[-1] if spelled else 0 for spelled in token_bytes)
        never = [token_id for token_id, spelled in enumerate(token_bytes) if _BARRED_PAIR.search(spelled)]
        self._kept = _all_but(never, num_words) if never else None
        self._kept_after = {
            lead: _all_but(
                [*never, *(number for number, spelled in enumerate(token_bytes) if spelled and spelled[0] in barred)],
                num_words,
            )
            for lead, barred in _BARRED.items()
        }

    def last_byte(self, token_id: int) -> int:
        """What a token ends with; 0 when it stands for no text."""
        return self._last_bytes[token_id] if token_id < len(self._last_bytes) else 0

    def forbid(self, words: NDArray[np.int32], last_byte: int) -> None:
        """Takes tokens that would make the text ill-formed out of a mask, in place."""
        kept = self._kept_after.get(last_byte, self._kept)
        if kept is not None:
            words &= kept


def _all_but(token_ids: Iterable[int], num_words: int) -> NDArray[np.int32]:
    bits = np.ones(num_words * 32, dtype=np.uint8)
    bits[[*token_ids]] = 0
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
