"""Faults of the transfer, put in on purpose: a pytest plugin; see `mutated.py` and `test_transfer_mutations.py`."""

from __future__ import annotations

from typing import Any

import mutated
from baleen_worker.transfer.actions import ProtocolError
from baleen_worker.transfer.fetching import Fetcher
from baleen_worker.transfer.messages import Chunk, Data, Final, FromDecode, Read, Sealed
from baleen_worker.transfer.receiving import ReceivingLeg
from baleen_worker.transfer.sending import SendingLeg
from baleen_worker.transfer.serving import Server

# pyright: reportPrivateUsage=false

_received, _lost, _take_chunk = ReceivingLeg.received, ReceivingLeg.lost, ReceivingLeg._take_chunk
_expected_pages = ReceivingLeg.expected_pages


def _without_digests(self: ReceivingLeg, message: Sealed, digests: list[int], now_s: float) -> Any:
    places = self._known.reading.get(message.first, [])
    return _received(self, message, [place.digest for place in places] or digests, now_s)


def _without_generations(self: ReceivingLeg, message: Sealed, digests: list[int], now_s: float) -> Any:
    places = self._known.reading.get(message.first, [])
    return _received(self, Sealed(message.first, [place.generation for place in places]), digests, now_s)


def _sealed_whatever(self: SendingLeg, read: Read, generations: list[int], now_s: float) -> Sealed:
    del self, generations, now_s
    return Sealed(read.first, read.generations)


def _keep_reads(self: ReceivingLeg, reason: str, now_s: float) -> Any:
    reading = dict(self._known.reading)
    actions = _lost(self, reason, now_s)
    self._known.reading.update(reading)
    return actions


def _hold_whatever(self: SendingLeg, read: Read) -> bool:
    del self
    return bool(read.pages)


def _trust_lengths(self: ReceivingLeg, message: Data) -> Any:
    """The fetcher compares the length with this number of pages; whatever is said, it fits."""

    class Whatever(int):
        def __mul__(self, other: int) -> int:
            del other
            return message.num_bytes

    return Whatever(_expected_pages(self, message))


def _trust_chunks(self: ReceivingLeg, chunk: Chunk, now_s: float) -> Any:
    self._num_pages, kept = max(self._num_pages, chunk.first + len(chunk.pages)), self._num_pages
    try:
        return _take_chunk(self, chunk, now_s)
    finally:
        self._num_pages = kept


def _trust_final(self: ReceivingLeg, final: Final, now_s: float) -> Any:
    self._final = final
    return self._go_on(now_s)


def _trust_acks(self: SendingLeg, message: FromDecode, now_s: float, hear: Any = SendingLeg.hear) -> Any:
    try:
        return hear(self, message, now_s)
    except ProtocolError:
        return []


MUTATIONS: dict[str, list[mutated.Patch]] = {
    "digest check skipped": [(ReceivingLeg, "received", _without_digests)],
    "generation check skipped by the reader": [(ReceivingLeg, "received", _without_generations)],
    "generation check skipped by the owner": [(SendingLeg, "copied", _sealed_whatever)],
    "reads of anything served": [(SendingLeg, "holds", _hold_whatever)],
    "withdraw does nothing": [(SendingLeg, "withdraw", lambda _: [])],
    "abort of a prefill leg dropped": [(Server, "cancel", lambda *_: None)],
    "abort of a decode leg dropped": [(Fetcher, "cancel", lambda *_: None)],
    "reads kept over a cut": [(ReceivingLeg, "lost", _keep_reads)],
    "length of pages trusted": [(ReceivingLeg, "expected_pages", _trust_lengths)],
    "length of announcements trusted": [(ReceivingLeg, "_take_chunk", _trust_chunks)],
    "final record trusted": [(ReceivingLeg, "_take_final", _trust_final)],
    "protocol errors forgiven": [(SendingLeg, "hear", _trust_acks)],
}

mutated.apply(MUTATIONS)
