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
class Peer:
    """A rank of the prefill worker that was started as `boot_epoch`, and where it serves pages (host:port)."""

    address: str
    boot_epoch: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Expect:
    """It is here, and this is its peer."""

    key: Key
    peer: Peer
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


# --- no leg -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """Try whether pages would come from this peer. Answered by a `ProbeEnded` with the same ticket."""

    ticket: int
    peer: Peer


Order = Open | Offer | Score | Finish | Withdraw | Expect | Receive | Cancel | Probe


@dataclass(frozen=True, slots=True)
class LegNews:
    """What has become of a leg."""

    key: Key
    report: Report


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A page came, was verified and stored in so many seconds; or why not."""

    ticket: int
    seconds: float
    failure: str | None


News = LegNews | ProbeEnded
