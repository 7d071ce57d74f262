"""What a scheduler asks of the transfer of its legs, and what it hears of them. Plain data, between two threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baleen_worker.step import TokenLogprobs
from baleen_worker.transfer.actions import Report
from baleen_worker.transfer.messages import Final, Key

# --- a prefill leg ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """It is here, and may be asked for."""

    key: Key


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages at places `first`, `first + 1`, … are computed and held; `generations` are theirs as pages are granted."""

    key: Key
    first: int
    pages: Sequence[int]
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of prompt tokens, the first of these being number `first` of all that are told."""

    key: Key
    first: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Finish:
    """The first token is sampled and all pages are offered: from now on they are held for the peer alone."""

    key: Key
    final: Final


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Its pages were taken away; they will be offered anew."""

    key: Key


# --- a decode leg -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expect:
    """It is here; its peer is the worker started as `boot_epoch` at `address`."""

    key: Key
    address: str
    boot_epoch: int
    dp_rank: int
    num_pages: int
    num_scored: int


@dataclass(frozen=True, slots=True)
class Receive:
    """`pages` are reserved for places `first`, `first + 1`, …; those before need not come."""

    key: Key
    first: int
    pages: Sequence[int]


# --- either -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    """It is over on this side. A decode leg is then told of as `Stopped`."""

    key: Key


Order = Open | Offer | Score | Finish | Withdraw | Expect | Receive | Cancel


@dataclass(frozen=True, slots=True)
class LegNews:
    """What has become of a leg."""

    key: Key
    report: Report
