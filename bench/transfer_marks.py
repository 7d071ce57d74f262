"""When what of a handover happens, on both sides: marks on the clock that all processes of a host share.

Puts marks around calls of the product while it runs; the product knows nothing of it. See `transfer_timeline.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from baleen_worker.cache import device_pages
from baleen_worker.transfer import wire
from baleen_worker.transfer.connection import Connection
from baleen_worker.transfer.orders import Offer
from baleen_worker.transfer.sending import SendingLeg
from baleen_worker.transfer.serving import Server
from baleen_worker.transfer.station import Station

# pyright: reportPrivateUsage=false

Mark = tuple[str, float]
_marks: list[Mark] = []
_device_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
_REPEATED = ("Alive", "Wait")
_options: set[str] = set()


def mark(name: str) -> None:
    """Now."""
    _marks.append((name, time.monotonic()))


def take() -> list[Mark]:
    """Marks since the last call, and how long the device took for what was launched, as a time from 0."""
    made = [*_marks]
    _marks.clear()
    for begin, end in _device_events:
        end.synchronize()
        made.append(("device", begin.elapsed_time(end) / 1000))
    _device_events.clear()
    return made


def choose(options: Sequence[str]) -> None:
    """From now on. "late": this process tells nothing before it is digested."""
    _options.clear()
    _options.update(options)


def watch(side: str) -> None:
    """From now on this process marks what it does. Once a process."""
    computed = SendingLeg.computed
    SendingLeg.computed = lambda self, message, now_s: [] if "late" in _options else computed(self, message, now_s)
    _around(Server, "offer", lambda order: f"{side} takes the order" if isinstance(order, Offer) else "", lambda *_: "")
    _around(Station, "digests", lambda *_: f"{side} digests", lambda *_: f"{side} has digested")
    _around(Connection, "send", lambda *_: "", lambda message: _named(f"{side} has sent", message))
    _around(Station, "tell", lambda *_: "", lambda _, report: f"{side} tells {type(report).__name__}")
    for name in ("decode_from_prefill", "decode_from_decode"):
        decode = getattr(wire, name)

        def heard(body: bytes, decode: Callable[[bytes], Any] = decode) -> Any:
            begun_s, message = time.monotonic(), decode(body)
            if name := _named(f"{side} has heard", message):
                _marks.append((name, begun_s))
            return message

        setattr(wire, name, heard)
    _watch_fills(side)


def _named(what: str, message: Any) -> str:
    kind = type(message).__name__
    return "" if kind in _REPEATED else f"{what} {kind}"


def _watch_fills(side: str) -> None:
    pages, slots = cast("Any", device_pages.DevicePoolPages), cast("Any", device_pages._Slot)
    fill, start = pages.fill, slots.start

    def marked_start(self: Any, *arguments: Any, fills: bool) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        start(self, *arguments, fills=fills)
        end.record(self._stream)
        if fills and len(arguments[1]) > 1:
            _device_events.append((begin, end))

    def marked(self: Any, *arguments: Any) -> Callable[[], list[int]]:
        if len(arguments[1]) == 1:  # to keep the links awake
            return fill(self, *arguments)
        mark(f"{side} launches")
        wait = fill(self, *arguments)
        mark(f"{side} has launched")

        def marked_wait() -> list[int]:
            mark(f"{side} waits")
            digests = wait()
            mark(f"{side} has copied")
            return digests

        return marked_wait

    slots.start, pages.fill = marked_start, marked


def _around(owner: Any, name: str, before: Callable[..., str], after: Callable[..., str]) -> None:
    """Marks named by a call's arguments; none where the name is empty."""
    inner = getattr(owner, name)

    def outer(self: Any, *arguments: Any, **named: Any) -> Any:
        if said := before(*arguments[:1]):
            mark(said)
        result = inner(self, *arguments, **named)
        if said := after(*arguments):
            mark(said)
        return result

    setattr(owner, name, outer)
