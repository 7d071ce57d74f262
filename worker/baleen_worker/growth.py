"""How many tokens running requests are expected to add. Owns one number, the share of the rest they will use.

Nobody knows how long an answer gets. Reserving all of `max_tokens` leaves most pages unused; reserving nothing preempts
often. So a running request is expected to use a share of what it may still generate. The share starts with caution and
falls while nothing goes wrong; a preemption sets it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from baleen_worker.slots import Ints

_FIRST_SHARE = 0.7
_LEAST_SHARE = 0.1
_STEPS_TO_LEAST = 600
# Beyond this an answer is expected to end, whatever it may use.
_MAX_EXPECTED_TOKENS = 4096


class GrowthEstimate:
    """`conservativeness` scales the share; 0 expects no growth at all."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._first = min(_FIRST_SHARE * conservativeness, 1.0)
        self._least = min(_LEAST_SHARE * conservativeness, 1.0)
        self._share = self._first

    def tokens(self, remaining: int) -> int:
        """Tokens that a request is expected to add when it may add `remaining`."""
        return int(min(remaining, _MAX_EXPECTED_TOKENS) * self._share)

    def total(self, remaining: Ints) -> int:
        """The same of many requests, summed."""
        return int((np.minimum(remaining, _MAX_EXPECTED_TOKENS) * self._share).astype(np.int64).sum())

    def stepped(self) -> None:
        """A step went by without a preemption."""
        self._share = max(self._share - (self._first - self._least) / _STEPS_TO_LEAST, self._least)

    def preempted(self) -> None:
        """The expectation was too low."""
        self._share = self._first
