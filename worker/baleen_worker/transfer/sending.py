"""The prefill leg of a transfer as a state machine: events in, actions out. Pure.

It announces what is computed and holds it until it is acknowledged or its lease ends. Every method returns what is to
be done, in that order.
"""

from __future__ import annotations

from baleen_worker.transfer.actions import (
    ALIVE_SHARE,
    Action,
    Close,
    HandedOver,
    LeaseEnded,
    ProtocolError,
    Send,
    Serve,
    Timers,
)
from baleen_worker.transfer.messages import (
    Ack,
    Alive,
    Chunk,
    Computed,
    Final,
    FromDecode,
    FromPrefill,
    Read,
    Refused,
    Released,
    Scores,
    Sealed,
    Stale,
    Took,
    Wait,
)


class SendingLeg:
    """A prompt that is computed here for another worker.

    One connection at a time: a new one replaces the last, and is told everything again.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._held: dict[int, tuple[int, int]] = {}  # announced places: page, generation
        self._digests: dict[int, int] = {}  # of the same
        self._scores: list[Scores] = []
        self._final: Final | None = None
        self._attached = False
        self._copies = False  # as its peer says of itself
        self._over = False
        self._heard_s = 0.0
        self._sent_s = 0.0

    # --- what happens here

    def computed(self, message: Computed, now_s: float) -> list[Action]:
        """These pages will be announced as soon as they are digested."""
        return self._tell(message, now_s) if self._copies else []

    def announce(self, chunk: Chunk, now_s: float) -> list[Action]:
        """These pages are computed and held."""
        self._held |= dict(enumerate(zip(chunk.pages, chunk.generations, strict=True), chunk.first))
        self._digests |= dict(enumerate(chunk.digests, chunk.first))
        return self._tell(chunk, now_s)

    def withdraw(self) -> list[Action]:
        """The pages announced so far are not held any more; they are computed again."""
        self._held.clear()
        return []

    def score(self, scores: Scores, now_s: float) -> list[Action]:
        """Log-probabilities of prompt tokens; those that a recomputed prompt would tell twice never come here."""
        self._scores.append(scores)
        return self._tell(scores, now_s)

    def finish(self, final: Final, now_s: float) -> list[Action]:
        """Everything is computed and announced: from now on the pages are held for the peer alone."""
        self._final = final
        self._heard_s = now_s
        return self._tell(final, now_s)

    def cancel(self, reason: str) -> list[Action]:
        """The leg is over on this side; its pages may change at once."""
        self._over = True
        self._held.clear()
        return [Send(Refused(reason)), Close()] if self._attached else []

    # --- what the peer does

    def attach(self, now_s: float, *, copies: bool = False) -> list[Action]:
        """A peer that wants this leg is connected. `copies`: see `Want`."""
        self._attached = True
        self._copies = copies
        self._heard_s = self._sent_s = now_s
        told: list[Action] = []
        places = sorted(self._held)
        while places:
            run = [place for offset, place in enumerate(places) if place == places[0] + offset]
            pages, generations = zip(*(self._held[place] for place in run), strict=True)
            told.append(Send(Chunk(run[0], [*pages], [*generations], [self._digests[place] for place in run])))
            places = places[len(run) :]
        told += [Send(scores) for scores in self._scores]
        if self._final is not None:
            told.append(Send(self._final))
        return told or [Send(Wait())]

    def detach(self) -> None:
        """Its connection is gone. It may come again while the lease lasts."""
        self._attached = False

    def hear(self, message: FromDecode, now_s: float) -> list[Action]:
        """A message of the attached peer. Raises ProtocolError."""
        self._heard_s = now_s
        match message:
            case Read():
                return [Serve(message)] if self.holds(message) else [Send(Stale(message.first, len(message.pages)))]
            case Took(first, pages, generations):
                return [Serve(Read(first, pages, generations), taken=True)]
            case Ack():
                if self._final is None:
                    raise ProtocolError("it acknowledges what was not sent")
                self._over = True
                return [Send(Released()), Close(), HandedOver()]
            case Alive():
                return []
            case _:
                raise ProtocolError(f"it sends a {type(message).__name__} in the middle of a leg")

    def copied(self, read: Read, generations: list[int], now_s: float) -> Sealed | Stale:
        """Its pages were copied out; `generations` are those that the pages had after the copy. What to answer."""
        if generations != read.generations or not self.holds(read):
            return Stale(read.first, len(read.pages))
        self._sent_s = now_s
        return Sealed(read.first, read.generations)

    def holds(self, read: Read) -> bool:
        """Whether these pages are announced under these generations. Raises ProtocolError for lists of two lengths."""
        if len(read.pages) != len(read.generations) or not read.pages:
            raise ProtocolError("it reads pages without numbers or generations")
        held = map(self._held.get, range(read.first, read.first + len(read.pages)))
        return [*held] == [*zip(read.pages, read.generations, strict=True)]

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if self._final is not None and not self._over and now_s - self._heard_s > self._timers.lease_s:
            self._over = True
            ends: list[Action] = [Send(Refused("the lease has ended")), Close()] if self._attached else []
            return [*ends, LeaseEnded()]
        if self._attached and now_s - self._sent_s > self._timers.progress_s * ALIVE_SHARE:
            return self._tell(Wait(), now_s)
        return []

    def _tell(self, message: FromPrefill, now_s: float) -> list[Action]:
        self._sent_s = now_s
        return [Send(message)] if self._attached else []
