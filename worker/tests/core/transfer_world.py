"""A small world of one prefill and one decode worker, simulated: seeded delays, cuts, restarts, aborts and bad reads.

Drives the state machines of `transfer` as the TCP thread does. Pages have contents that say whose they are; pages
that are given back are granted to somebody else at once, so whoever reads one too late reads something foreign.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baleen_worker.transfer.actions import (
    Action,
    Arrived,
    Begun,
    Close,
    Connect,
    Failed,
    HandedOver,
    LeaseEnded,
    ProtocolError,
    Send,
    Serve,
    Stopped,
    Store,
    Timers,
)
from baleen_worker.transfer.messages import (
    Chunk,
    Final,
    FromDecode,
    FromPrefill,
    Key,
    Read,
    Released,
    Sealed,
    Stale,
    Took,
    Want,
)
from baleen_worker.transfer.receiving import ReceivingLeg
from baleen_worker.transfer.sending import SendingLeg

Content = tuple[int, int]  # whose, and which place
VOCAB = 1000
TIMERS = Timers(progress_s=10.0, lease_s=30.0)
_FOREIGN = -1


@dataclass(frozen=True)
class Checks:
    """What the world may leave out, to show that it is needed. `lent`: pages are copied out of lent memory."""

    digests: bool = True
    generations: bool = True
    lent: bool = False


@dataclass(eq=False)
class Link:
    """One connection: messages arrive in order, unless it is cut."""

    is_open: bool = True
    last_s: float = 0.0


@dataclass
class PrefillSide:
    leg: SendingLeg
    pages: list[int] = field(default_factory=list[int])
    link: Link | None = None
    num_done: int = 0
    holds: bool = True


@dataclass
class DecodeSide:
    leg: ReceivingLeg
    epoch: int
    stored: dict[int, Content] = field(default_factory=dict[int, Content])
    link: Link | None = None
    num_pending: int = 0
    end: str | None = None
    is_gone: bool = False
    taken: dict[int, tuple[list[Content], list[int]]] = field(
        default_factory=dict[int, tuple[list[Content], list[int]]]
    )


class World:
    """`num_legs` requests of up to eight pages, over 40 pages of the prefill worker."""

    def __init__(self, seed: int, checks: Checks, num_legs: int = 4) -> None:
        self.random = random.Random(seed)
        self.checks = checks
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.epoch = 1
        self.free = list(range(40))
        self.contents: list[Content] = [(_FOREIGN, 0)] * 40
        self.generations = [0] * 40
        self.lengths = {(bytes([n]), 0): self.random.randint(1, 8) for n in range(num_legs)}
        self.prefill: dict[Key, PrefillSide] = {}
        self.decode: dict[Key, DecodeSide] = {}
        self.handed_over: set[Key] = set()
        for key in self.lengths:
            self._later(self.random.uniform(0, 2), lambda key=key: self._open_prefill(key))
            self._later(self.random.uniform(0, 2), lambda key=key: self._open_decode(key))
            if self.random.random() < 0.25:
                self._later(self.random.uniform(0, 4), lambda key=key: self._abort_decode(key))
            if self.random.random() < 0.2:
                self._later(self.random.uniform(0, 4), lambda key=key: self._abort_prefill(key))
            for _ in range(self.random.choice([0, 0, 1, 2, 7])):
                self._later(self.random.uniform(0, 4), lambda key=key: self._cut(key))
        if self.random.random() < 0.2:
            self._later(self.random.uniform(0, 4), self._restart_prefill)
        if self.random.random() < 0.2:
            self._later(self.random.uniform(0, 4), self._restart_decode)
        self._later(0.5, self._tick)

    def run(self) -> None:
        """Until nothing happens any more, then judges."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            assert self.now_s < 1000, "something goes on for ever"
            event()
        for key, side in self.decode.items():
            assert side.end is not None or side.is_gone, f"{key} never ended"
        assert not any(side.holds for side in self.prefill.values()), "pages are held for ever"
        assert len(self.free) == 40, "pages are lost"

    # --- time -------------------------------------------------------------------------------------------------------

    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), event))

    def _tick(self) -> None:
        for key, side in list(self.prefill.items()):
            if side.holds:
                self._act_prefill(key, side, side.leg.tick(self.now_s))
        for key, side in list(self.decode.items()):
            self._act_decode(key, side, side.leg.tick(self.now_s))
        if self.now_s < 100:
            self._later(0.5, self._tick)

    # --- the prefill worker -----------------------------------------------------------------------------------------

    def _open_prefill(self, key: Key) -> None:
        side = self.prefill[key] = PrefillSide(SendingLeg(TIMERS))
        self._grant(key, side)
        self._later(self.random.uniform(0, 0.5), lambda: self._compute(key, side))

    def _grant(self, key: Key, side: PrefillSide) -> None:
        for place in range(self.lengths[key]):
            page = self.free.pop(0)
            side.pages.append(page)
            self.generations[page] += 1
            self.contents[page] = (key[0][0], place)

    def _give_back(self, side: PrefillSide) -> None:
        """Somebody else gets the pages, writes them, and gives them back."""
        for page in side.pages:
            self.generations[page] += 1
            self.contents[page] = (_FOREIGN, page)
            self.free.insert(self.random.choice([0, len(self.free)]), page)
        side.pages = []

    def _compute(self, key: Key, side: PrefillSide) -> None:
        if self.prefill.get(key) is not side or not side.holds:
            return
        total = self.lengths[key]
        if side.num_done and self.random.random() < 0.1:
            self.seen["preempted"] += 1
            self._act_prefill(key, side, side.leg.withdraw())
            self._give_back(side)
            self._grant(key, side)
            side.num_done = 0
        end = min(total, side.num_done + self.random.randint(1, 3))
        places = range(side.num_done, end)
        pages = [side.pages[place] for place in places]
        chunk = Chunk(
            side.num_done,
            pages,
            [self.generations[page] for page in pages],
            [hash(self.contents[page]) for page in pages],
        )
        side.num_done = end
        self._act_prefill(key, side, side.leg.announce(chunk, self.now_s))
        if end < total:
            self._later(self.random.uniform(0, 0.5), lambda: self._compute(key, side))
            return
        self._act_prefill(key, side, side.leg.finish(Final(7, 0, total), self.now_s))

    def _abort_prefill(self, key: Key) -> None:
        side = self.prefill.get(key)
        if side is not None and side.holds:
            actions = side.leg.cancel("it was aborted")
            self._end_prefill(key, side, "aborted")
            self._act_prefill(key, side, actions)

    def _end_prefill(self, key: Key, side: PrefillSide, how: str) -> None:
        assert side.holds, "a prefill leg ends twice"
        side.holds = False
        self.seen[f"prefill {how}"] += 1
        self._give_back(side)

    def _restart_prefill(self) -> None:
        """Generations start anew, as page numbers do: only the boot epoch tells."""
        self.seen["prefill restarted"] += 1
        self.epoch += 1
        for key, side in list(self.prefill.items()):
            if side.holds:
                self._end_prefill(key, side, "restarted")
            self._drop_link(side.link)
        self.prefill.clear()
        self.handed_over.clear()
        self.generations = [0] * 40

    def _act_prefill(self, key: Key, side: PrefillSide, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._send_to_decode(key, side.link, message)
                case Serve(read, taken) if taken:
                    self._send_to_decode(key, side.link, self._judge(side, read))
                case Serve(read):
                    link = side.link
                    self._later(
                        self.random.uniform(0, 1.0), lambda read=read, link=link: self._copy(key, side, link, read)
                    )
                case Close():
                    link = side.link
                    self._later(1.0, lambda link=link: self._drop_link(link))
                case HandedOver():
                    self.handed_over.add(key)
                    self._end_prefill(key, side, "handed over")
                case LeaseEnded():
                    self._end_prefill(key, side, "lease ended")
                case _:
                    raise AssertionError(f"a prefill leg wants {action}")

    def _copy(self, key: Key, side: PrefillSide, link: Link | None, read: Read) -> None:
        """Between the copy and the look at the generations, pages may change hands."""
        copied, digests = self._read(read)
        self._send_to_decode(key, link, self._judge(side, read), copied, digests)

    def _read(self, read: Read) -> tuple[list[Content], list[int]]:
        """What is in the pages now, and digests of what came of it."""
        copied = [self.contents[page] for page in read.pages]
        if self.random.random() < 0.05:
            self.seen["damaged"] += 1
            copied[0] = (_FOREIGN, 99)
        return copied, [hash(content) for content in copied]

    def _judge(self, side: PrefillSide, read: Read) -> Sealed | Stale:
        after = [self.generations[page] for page in read.pages] if self.checks.generations else read.generations
        answer = side.leg.copied(read, after, self.now_s)
        if not self.checks.generations:
            answer = Sealed(read.first, read.generations)
        self.seen["stale"] += isinstance(answer, Stale)
        return answer

    # --- the decode worker ------------------------------------------------------------------------------------------

    def _open_decode(self, key: Key) -> None:
        num_pages = self.lengths[key]
        leg = ReceivingLeg(
            key,
            TIMERS,
            num_pages=num_pages,
            num_scored=0,
            vocab_size=VOCAB,
            pages_per_read=self.random.randint(1, 3),
            now_s=self.now_s,
        )
        side = self.decode[key] = DecodeSide(leg, self.epoch)
        self._act_decode(key, side, leg.start())

    def _abort_decode(self, key: Key) -> None:
        side = self.decode.get(key)
        if side is not None and side.end is None and not side.is_gone:
            self._act_decode(key, side, side.leg.cancel())

    def _restart_decode(self) -> None:
        self.seen["decode restarted"] += 1
        for side in self.decode.values():
            side.is_gone = side.end is None
            side.leg.over = True
            self._drop_link(side.link)

    def _act_decode(
        self, key: Key, side: DecodeSide, actions: Sequence[Action], copied: Sequence[Content] = ()
    ) -> None:
        for action in actions:
            match action:
                case Send(Read() as read) if self.checks.lent:
                    link = side.link
                    self._later(
                        self.random.uniform(0, 1.0), lambda read=read, link=link: self._take(key, side, link, read)
                    )
                case Send(message):
                    self._send_to_prefill(key, side.link, message)
                case Connect(delay_s):
                    self._later(delay_s + self.random.uniform(0, 0.1), lambda: self._connect(key, side))
                case Store(first, count):
                    assert side.end is None, "a page is stored after the end"
                    side.stored |= dict(enumerate(copied[:count], first))
                case Close():
                    self._drop_link(side.link)
                case Begun():
                    self._later(self.random.uniform(0, 2.0), lambda: self._reserve(key, side))
                case Arrived():
                    self._check_arrival(key, side)
                    self._end_decode(side, "arrived")
                case Failed():
                    self._end_decode(side, "failed")
                case Stopped():
                    self._end_decode(side, "stopped")
                case _:
                    raise AssertionError(f"a decode leg wants {action}")

    def _take(self, key: Key, side: DecodeSide, link: Link | None, read: Read) -> None:
        """Copies pages out of the prefill worker's memory, whoever they are now, and asks what they are worth."""
        if side.link is link and not side.leg.over and side.epoch == self.epoch:
            side.taken[read.first] = self._read(read)
            self._send_to_prefill(key, link, Took(read.first, read.pages, read.generations))

    def _end_decode(self, side: DecodeSide, how: str) -> None:
        assert side.end is None, "a decode leg ends twice"
        side.end = how
        self.seen[f"decode {how}"] += 1

    def _check_arrival(self, key: Key, side: DecodeSide) -> None:
        expected = {place: (key[0][0], place) for place in range(side.num_pending, self.lengths[key])}
        assert side.stored == expected, "a page is foreign, stale or missing"

    def _reserve(self, key: Key, side: DecodeSide) -> None:
        """`num_pending` pages are in the decode worker's own cache."""
        if side.end is None and not side.is_gone:
            side.num_pending = self.random.choice([0, 0, min(1, self.lengths[key])])
            self._act_decode(key, side, side.leg.reserve(side.num_pending, self.now_s))

    # --- between them -----------------------------------------------------------------------------------------------

    def _connect(self, key: Key, side: DecodeSide) -> None:
        if side.leg.over or side.is_gone:
            return
        if side.epoch != self.epoch:
            self._act_decode(key, side, side.leg.rejected("started anew"))
            return
        side.link = Link()
        self._act_decode(key, side, side.leg.connected(self.now_s))

    def _arrival_s(self, link: Link) -> float:
        link.last_s = max(link.last_s, self.now_s + self.random.uniform(0, 0.3))
        return link.last_s - self.now_s

    def _send_to_prefill(self, key: Key, link: Link | None, message: FromDecode | FromPrefill) -> None:
        if link is not None and link.is_open:
            self._later(self._arrival_s(link), lambda: self._hear_at_prefill(key, link, message))

    def _hear_at_prefill(self, key: Key, link: Link, message: FromDecode | FromPrefill) -> None:
        side = self.prefill.get(key)
        if not link.is_open:
            return
        if isinstance(message, Want):
            if key in self.handed_over:
                self._send_to_decode(key, link, Released())
            elif side is None or not side.holds:
                self._later(1.0, lambda: self._hear_at_prefill(key, link, message))  # it waits, or is dropped in time
            else:
                self._drop_link(side.link)
                side.link = link
                self._act_prefill(key, side, side.leg.attach(self.now_s))
        elif side is not None and side.holds and side.link is link:
            self._act_prefill(key, side, side.leg.hear(message, self.now_s))  # pyright: ignore[reportArgumentType]

    def _send_to_decode(
        self,
        key: Key,
        link: Link | None,
        message: FromDecode | FromPrefill,
        copied: Sequence[Content] = (),
        digests: Sequence[int] = (),
    ) -> None:
        if link is not None and link.is_open:
            self._later(self._arrival_s(link), lambda: self._hear_at_decode(key, link, message, copied, digests))

    def _hear_at_decode(
        self,
        key: Key,
        link: Link,
        message: FromDecode | FromPrefill,
        copied: Sequence[Content],
        digests: Sequence[int],
    ) -> None:
        side = self.decode.get(key)
        if side is None or side.leg.over or side.link is not link or not link.is_open:
            return
        if self.checks.lent and isinstance(message, Sealed | Stale):
            copied, digests = side.taken.pop(message.first)
        try:
            if isinstance(message, Sealed):
                if not self.checks.digests:
                    reading = side.leg._known.reading[message.first]  # pyright: ignore[reportPrivateUsage]
                    digests = [place.digest for place in reading]
                actions = side.leg.received(message, list(digests), self.now_s)
            else:
                actions = side.leg.hear(message, self.now_s)  # pyright: ignore[reportArgumentType]
        except ProtocolError as error:
            raise AssertionError(f"an honest peer breaks the protocol: {error}") from None
        self._act_decode(key, side, actions, copied)

    def _cut(self, key: Key) -> None:
        side = self.decode.get(key)
        if side is not None and side.link is not None and side.link.is_open:
            self.seen["cut"] += 1
            self._drop_link(side.link)

    def _drop_link(self, link: Link | None) -> None:
        if link is None or not link.is_open:
            return
        link.is_open = False
        for side in self.prefill.values():
            if side.link is link:
                side.link = None
                side.leg.detach()
        for key, side in self.decode.items():
            if side.link is link:
                side.link = None
                self._later(0.0, lambda key=key, side=side: self._lose(key, side))

    def _lose(self, key: Key, side: DecodeSide) -> None:
        side.taken.clear()
        if not side.leg.over and not side.is_gone:
            self._act_decode(key, side, side.leg.lost("its connection has ended", self.now_s))
