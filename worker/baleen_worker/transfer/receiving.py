"""The decode leg of a transfer as a state machine: events in, actions out. Pure.

It reads into pages that it has reserved; a page is stored only when its place, generation, length and digest are those
that were announced. What fails a check is read again a few times, then the leg fails: its request is the gateway's to
retry. Every method returns what is to be done, in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baleen_worker.step import TokenLogprobs
from baleen_worker.transfer.actions import (
    ALIVE_SHARE,
    Action,
    Arrived,
    Begun,
    Close,
    Connect,
    Failed,
    ProtocolError,
    Send,
    Stopped,
    Store,
    Timers,
)
from baleen_worker.transfer.messages import (
    Ack,
    Alive,
    Chunk,
    Data,
    Final,
    FromPrefill,
    Key,
    Read,
    Refused,
    Released,
    Scores,
    Sealed,
    Stale,
    Wait,
    Want,
)

# Reads of one leg under way at a time: the next is gathered while the last is stored.
WINDOW = 2
_MAX_BAD_READS = 4
_MAX_LOSSES = 5
_FIRST_BACKOFF_S = 0.05


@dataclass(slots=True)
class _Place:
    page: int
    generation: int
    digest: int


@dataclass(slots=True)
class _Progress:
    """What is known of the pages. `missing` are places that are to be read; None before any is reserved.

    `announced` and not asked for yet; those of a read under way are in `reading`.
    """

    announced: dict[int, _Place] = field(default_factory=dict[int, _Place])
    missing: set[int] | None = None
    reading: dict[int, list[_Place]] = field(default_factory=dict[int, list[_Place]])  # by first place


class ReceivingLeg:
    """A prompt that another worker computes for this one.

    `num_pages` the prompt has; `num_scored` of its tokens have log-probabilities; ids are below `vocab_size`.
    """

    def __init__(
        self,
        key: Key,
        timers: Timers,
        *,
        num_pages: int,
        num_scored: int,
        vocab_size: int,
        pages_per_read: int,
        now_s: float,
    ) -> None:
        self._key = key
        self._timers = timers
        self._num_pages = num_pages
        self._num_scored = num_scored
        self._vocab_size = vocab_size
        # May be changed before each connection.
        self.pages_per_read = pages_per_read
        self.copies = False  # out of lent memory
        self._known = _Progress()
        self._scores = TokenLogprobs()
        self._final: Final | None = None
        self._connected = False
        self._begun = False
        self._arrived = False
        self.over = False
        self._num_bad_reads = 0
        self._num_losses = 0
        self._progress_s = self._sent_s = now_s

    # --- what happens here

    def start(self) -> list[Action]:
        """The request has come."""
        return [Connect(0.0)]

    def reserve(self, first: int, now_s: float) -> list[Action]:
        """Pages from place `first` on are reserved; those before it need not come."""
        self._known.missing = set(range(first, self._num_pages))
        self._progress_s = now_s
        return self._go_on(now_s)

    def cancel(self) -> list[Action]:
        """Nobody wants the pages any more."""
        self.over = True
        return [Close(), Stopped()]

    # --- what the peer does

    def connected(self, now_s: float) -> list[Action]:
        """Greetings are exchanged."""
        self._connected = True
        self._sent_s = now_s
        wants: list[Action] = [Send(Want(*self._key, copies=self.copies))]
        return [*wants, Send(Ack())] if self._arrived else wants

    def lost(self, reason: str, now_s: float) -> list[Action]:
        """The connection has ended or could not be made: reads under way are void."""
        self._connected = False
        self._known.reading.clear()
        self._known.announced.clear()
        self._num_losses += 1
        if self._num_losses > _MAX_LOSSES:
            return self._fail(reason)
        return [Connect(_FIRST_BACKOFF_S * 2 ** (self._num_losses - 1))]

    def rejected(self, reason: str) -> list[Action]:
        """The peer is not the one that was meant, or refuses: another try is in vain."""
        return self._fail(reason)

    def hear(self, message: FromPrefill, now_s: float) -> list[Action]:
        """A message of the peer, `Data` and `Sealed` excepted. Raises ProtocolError."""
        if not self._begun or self._known.missing is None:
            self._progress_s = now_s
        match message:
            case Wait():
                return []
            case Chunk():
                return self._take_chunk(message, now_s)
            case Stale(first, _):
                places = self._known.reading.pop(first, None)
                if places is None:
                    raise ProtocolError("it answers a read that was not sent")
                for place in range(first, first + len(places)):
                    self._known.announced.pop(place, None)
                return self._bad_read("pages change while they are read") or self._go_on(now_s)
            case Scores(first, logprobs):
                return self._take_scores(first, logprobs, now_s)
            case Final():
                return self._take_final(message, now_s)
            case Released():
                if not self._arrived:
                    return self._fail("it has handed this leg over already: its name was used twice")
                self.over = True
                return [Close()]
            case Refused(reason):
                return self._fail(reason)
            case _:
                raise ProtocolError(f"it sends a {type(message).__name__} in the middle of a leg")

    def expected_pages(self, message: Data) -> int:
        """How many pages follow the frame. Raises ProtocolError for an answer to nothing."""
        places = self._known.reading.get(message.first)
        if places is None:
            raise ProtocolError("it answers a read that was not sent")
        return len(places)

    def has_use_for(self, first: int, count: int) -> bool:
        """Whether these places are reserved and neither filled nor read: a copy may begin before they are announced."""
        known, places = self._known, set(range(first, first + count))
        if self.over or known.missing is None or not places <= known.missing:
            return False
        return all(places.isdisjoint(range(at, at + len(read))) for at, read in known.reading.items())

    def received(self, message: Sealed, digests: list[int], now_s: float) -> list[Action]:
        """The pages of an answer have come, with these digests. Raises ProtocolError for an answer to nothing."""
        places = self._known.reading.pop(message.first, None)
        if places is None:
            raise ProtocolError("it answers a read that was not sent")
        is_good = [place.generation for place in places] == message.generations and [
            place.digest for place in places
        ] == digests
        if not is_good:  # they may have been announced anew meanwhile
            self._known.announced = dict(enumerate(places, message.first)) | self._known.announced
            return self._bad_read("pages come damaged") or self._go_on(now_s)
        assert self._known.missing is not None, "pages are read before any is reserved"
        self._known.missing.difference_update(range(message.first, message.first + len(places)))
        self._progress_s = now_s
        return [Store(message.first, len(places)), *self._go_on(now_s)]

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        if self.over:
            return []
        if now_s - self._progress_s > self._timers.progress_s:
            return self._fail(f"it made no progress for {self._timers.progress_s:g} s")
        if self._connected and now_s - self._sent_s > self._timers.lease_s * ALIVE_SHARE:
            self._sent_s = now_s
            return [Send(Alive())]
        return []

    # --- within

    def _take_chunk(self, chunk: Chunk, now_s: float) -> list[Action]:
        count = len(chunk.pages)
        if not (count == len(chunk.generations) == len(chunk.digests) > 0):
            raise ProtocolError("it announces pages without generations or digests")
        if chunk.first < 0 or chunk.first + count > self._num_pages:
            raise ProtocolError("it announces pages that the prompt does not have")
        entries = zip(chunk.pages, chunk.generations, chunk.digests, strict=True)
        for place, entry in enumerate(entries, chunk.first):
            self._known.announced[place] = _Place(*entry)
        self._progress_s = now_s
        begins: list[Action] = [] if self._begun else [Begun()]
        self._begun = True
        return begins + self._go_on(now_s)

    def _take_scores(self, first: int, logprobs: TokenLogprobs, now_s: float) -> list[Action]:
        known = len(self._scores.token_ids)
        count = len(logprobs.token_ids)
        lengths = {len(logprobs.logprobs), len(logprobs.top_token_ids), len(logprobs.top_logprobs)}
        if lengths != {count} or first > known or first + count > self._num_scored:
            raise ProtocolError("it scores other tokens than the prompt's")
        self._progress_s = now_s
        for name in msgspec.structs.asdict(logprobs):
            getattr(self._scores, name).extend(getattr(logprobs, name)[known - first :])
        return []

    def _take_final(self, final: Final, now_s: float) -> list[Action]:
        if final.num_pages != self._num_pages or not 0 <= final.token_id < self._vocab_size:
            raise ProtocolError("its final record does not fit the prompt")
        if len(self._scores.token_ids) != self._num_scored:
            raise ProtocolError("its final record comes before all scores")
        self._final = final
        self._progress_s = now_s
        return self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Action]:
        """Reads what may be read; when nothing is missing, arrives."""
        known = self._known
        if known.missing is None or self._arrived or self.over:
            return []
        if not known.missing and self._final is not None:
            self._arrived = True
            scores = self._scores if self._num_scored else None
            acks: list[Action] = [Send(Ack())] if self._connected else []
            return [Arrived(self._final, scores), *acks]
        actions: list[Action] = []
        while self._connected and len(known.reading) < WINDOW:
            run = self._next_run(known.missing)
            if not run:
                break
            places = [known.announced.pop(place) for place in run]
            known.reading[run[0]] = places
            self._sent_s = now_s
            actions.append(Send(Read(run[0], [p.page for p in places], [p.generation for p in places])))
        return actions

    def _next_run(self, missing: set[int]) -> list[int]:
        """The first places in a row that are missing, announced and not under way, as many as one read may have."""
        open_places = missing & self._known.announced.keys()
        for first, places in self._known.reading.items():
            open_places.difference_update(range(first, first + len(places)))
        ready = sorted(open_places)
        return [place for offset, place in enumerate(ready[: self.pages_per_read]) if place == ready[0] + offset]

    def _bad_read(self, reason: str) -> list[Action]:
        self._num_bad_reads += 1
        return self._fail(reason) if self._num_bad_reads > _MAX_BAD_READS else []

    def _fail(self, reason: str) -> list[Action]:
        """Whoever has arrived already loses nothing: the pages are then freed when their lease ends."""
        self.over = True
        return [Close()] if self._arrived else [Close(), Failed(reason)]
