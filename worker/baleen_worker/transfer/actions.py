"""What a leg of a transfer asks of whoever drives it, and how long it waits. See sending.py and receiving.py.

No I/O, no clock, no tensors: times are the caller's, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from baleen_worker.step import TokenLogprobs
from baleen_worker.transfer.messages import Final, FromDecode, FromPrefill, Read

# Shares of the peer's patience after which a quiet side says that it is alive.
ALIVE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Timers:
    """How long a decode leg waits for a peer that does nothing, and how long pages are held for one."""

    progress_s: float = 10.0
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Send:
    """Over the leg's connection."""

    message: FromDecode | FromPrefill


@dataclass(frozen=True, slots=True)
class Connect:
    """To the peer, after so long."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Close:
    """The leg's connection, if there is one, once what was sent is on its way."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Send these pages if the leg still `holds` them, then ask `copied` what they are worth.

    `taken`: they have been copied already; only the second is left to do.
    """

    read: Read
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """What has just come for places `first` to `first + count` is good: keep it."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The prefill leg computes: pages may be reserved."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """All pages are stored; the first token, and log-probabilities of the prompt."""

    final: Final
    prompt_logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer did not do its part. Nothing of the leg is read or stored any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A cancelled leg: nothing of it is read or stored any more."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode leg has everything: the pages need not be held any more."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Nobody came for the pages, or whoever came has vanished."""


Report = Begun | Arrived | Failed | Stopped | HandedOver | LeaseEnded
Action = Send | Connect | Close | Serve | Store | Report


class ProtocolError(Exception):
    """The peer says what it must not: its connection is to be dropped, and nothing else changes."""
