"""Pages that couriers bring between real processes: what comes, and what a fault of a side or a courier costs."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from baleen_worker.transfer import wire
from baleen_worker.transfer.actions import Arrived, Failed
from baleen_worker.transfer.couriers import NIXL, Couriers
from baleen_worker.transfer.lending import LoanError
from baleen_worker.transfer.messages import Ack, Gather, Gathered, Key, Lend, Lent
from baleen_worker.transfer.nixl_process import PACKAGES
from baleen_worker.transfer.staged import StagedLoan
from staged_peer import DECODE, NUM_PAGES, PAGE_BYTES, Pool, Side, SideProcess, couriers_of, new_key
from test_transfer_tcp import Forger

MANY = range(1, NUM_PAGES)
THEIRS, OURS = [3, 4, 5, 9, 8, 20], [11, 12, 30, 31, 1, 2]
STAND_IN = str(Path(__file__).with_name("courier_stand_in.py"))
_HAS_NIXL = any(map(importlib.util.find_spec, PACKAGES))


@pytest.fixture(params=["stand-in", pytest.param("nixl", marks=pytest.mark.skipif(not _HAS_NIXL, reason="no nixl"))])
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The hardest way for NIXL: over TCP, the peer's courier sends what is read from it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return NIXL if request.param == "nixl" else (STAND_IN, str(tmp_path))


@pytest.fixture
def prefill(program: Sequence[str]) -> Iterator[SideProcess]:
    side = SideProcess(1, program, listens=True)
    yield side
    side.end()


@pytest.fixture
def decode(program: Sequence[str]) -> Iterator[Side]:
    side = Side(2, program, listens=False)
    yield side
    side.transfer.close()
    assert couriers_of(None) == []


def begin(prefill: SideProcess, decode: Side, theirs: Sequence[int]) -> Key:
    """A leg that is announced, and not read yet."""
    key = new_key()
    prefill.ask("offer", key, theirs)
    decode.expect(prefill.address, len(theirs), key)
    return key


def take(prefill: SideProcess, decode: Side, theirs: Sequence[int], ours: Sequence[int]) -> None:
    """A leg from its beginning to its end, on a way that has been tried until it is there, as a request's is."""
    deadline_s = time.monotonic() + 60
    while (failure := decode.probe(prefill.address)) is not None:
        assert time.monotonic() < deadline_s, failure
    key = begin(prefill, decode, theirs)
    decode.receive(key, ours)
    decode.wait_for(key, Arrived)


def check(decode: Side, seed: int, theirs: Sequence[int], ours: Sequence[int]) -> None:
    """Those have come bit by bit from the pool of that seed; of the rest, nothing but the sink page has changed."""
    expected = Pool(2).bytes
    expected[[*ours]] = Pool(seed).bytes[[*theirs]]
    np.testing.assert_array_equal(decode.pool.bytes[1:], expected[1:])


def test_pages_come_bit_by_bit_and_legs_share_a_courier(prefill: SideProcess, decode: Side) -> None:
    assert decode.probe(prefill.address) is None
    [courier] = prefill.couriers()
    for _ in range(3):
        take(prefill, decode, THEIRS, OURS)
    check(decode, 1, THEIRS, OURS)
    assert prefill.ask("counters") == (3 * len(THEIRS), 0)
    assert prefill.couriers() == [courier]
    assert len(couriers_of(None)) == 1


def test_a_page_that_was_granted_to_somebody_else_is_read_again(prefill: SideProcess, decode: Side) -> None:
    assert decode.probe(prefill.address) is None
    key = begin(prefill, decode, THEIRS)
    prefill.ask("grant", THEIRS[2])
    decode.receive(key, OURS)
    decode.wait(lambda: prefill.ask("counters")[1] > 0)
    assert not any(isinstance(report, Arrived) for report in decode.told[key])
    prefill.ask("offer_again", key, THEIRS)
    decode.wait_for(key, Arrived)
    check(decode, 1, THEIRS, OURS)


def test_a_page_that_changed_is_not_taken(prefill: SideProcess, decode: Side) -> None:
    assert decode.probe(prefill.address) is None
    key = begin(prefill, decode, THEIRS)
    prefill.ask("spoil", THEIRS[2])
    decode.receive(key, OURS)
    assert decode.wait_for(key, Failed) == Failed("pages come damaged")
    assert decode.transfer.counters.num_damaged_reads > 0
    assert decode.transfer.counters.num_pages_received == 0


@pytest.mark.parametrize("whose", ["reader", "owner"])
def test_a_courier_that_dies_in_the_middle_costs_a_repetition(prefill: SideProcess, decode: Side, whose: str) -> None:
    assert decode.probe(prefill.address) is None
    [courier] = couriers_of(None) if whose == "reader" else prefill.couriers()
    key = begin(prefill, decode, MANY)
    stop(prefill)
    decode.receive(key, MANY)
    time.sleep(0.2)  # most of the time, a read is under way by now
    courier.kill()
    for other in prefill.couriers():
        with contextlib.suppress(psutil.NoSuchProcess):
            other.resume()
    # A machine that has other work may not start new ones before the leg's time is over.
    decode.wait(lambda: isinstance(decode.told[key][-1], Failed | Arrived))
    take(prefill, decode, MANY, MANY)
    check(decode, 1, MANY, MANY)


def stop(prefill: SideProcess) -> None:
    """Its couriers: what is read from them does not come."""
    for courier in prefill.couriers():
        courier.suspend()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["courier", "worker"])
def test_what_a_stopped_peer_was_asked_for_never_lands_later(
    prefill: SideProcess, decode: Side, program: Sequence[str], what: str
) -> None:
    """Another leg has the pages when the peer wakes."""
    assert decode.probe(prefill.address) is None
    stopped = prefill.couriers()
    key = begin(prefill, decode, MANY)
    stop(prefill)
    if what == "worker":
        prefill.signal(signal.SIGSTOP)
    decode.receive(key, MANY)
    decode.wait(lambda: isinstance(decode.told[key][-1], Failed | Arrived))
    other = SideProcess(3, program, listens=True)
    take(other, decode, [*reversed(MANY)], MANY)
    prefill.signal(signal.SIGCONT)
    for courier in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            courier.resume()
    take(prefill, decode, [5], [0])
    check(decode, 3, [*reversed(MANY)], MANY)
    other.end()


@pytest.mark.slow
def test_a_prefill_worker_killed_in_the_middle_costs_its_legs_alone(
    prefill: SideProcess, decode: Side, program: Sequence[str]
) -> None:
    other = SideProcess(3, program, listens=True)
    take(other, decode, [1], [1])
    take(prefill, decode, [1], [1])
    couriers = prefill.couriers()
    key = begin(prefill, decode, MANY)
    decode.receive(key, MANY)
    prefill.signal(signal.SIGKILL)
    decode.wait(lambda: isinstance(decode.told[key][-1], Failed | Arrived))
    take(other, decode, MANY, MANY)
    check(decode, 3, MANY, MANY)
    psutil.wait_procs(couriers, timeout=10)
    assert not any(courier.is_running() for courier in couriers)
    other.end()


def test_a_decode_worker_killed_in_the_middle_disturbs_nobody(
    prefill: SideProcess, decode: Side, program: Sequence[str]
) -> None:
    take(prefill, decode, [1], [1])
    [ours] = prefill.couriers()
    reader = SideProcess(4, program, listens=False)
    assert reader.ask("probe", prefill.address) is None
    key = new_key()
    prefill.ask("offer", key, MANY)
    reader.ask("expect", prefill.address, len(MANY), key)
    theirs, couriers = [one for one in prefill.couriers() if one != ours], reader.couriers()
    reader.tell("receive", key, MANY)
    reader.signal(signal.SIGKILL)
    take(prefill, decode, MANY, MANY)
    check(decode, 1, MANY, MANY)
    psutil.wait_procs([*theirs, *couriers], timeout=10)
    assert len(theirs) == len(couriers) == 1
    assert prefill.couriers() == [ours]
    reader.end()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "fail", "die"])
def test_a_read_that_fails_ends_its_loan_and_is_repeated(
    prefill: SideProcess, decode: Side, program: Sequence[str], tmp_path: Path, fault: str
) -> None:
    if program is NIXL:
        pytest.skip("it has no faults to order")
    take(prefill, decode, [1], [1])
    key = begin(prefill, decode, MANY)
    (tmp_path / "fault").write_text(fault)
    first = couriers_of(None)
    decode.receive(key, MANY)
    decode.wait(lambda: not first[0].is_running() or first[0].status() == psutil.STATUS_ZOMBIE)
    (tmp_path / "fault").unlink()
    decode.wait(lambda: isinstance(decode.told[key][-1], Failed | Arrived))
    take(prefill, decode, MANY, MANY)
    check(decode, 1, MANY, MANY)
    assert couriers_of(None) != first


def test_a_library_that_does_not_start_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(1)\n")
    with pytest.raises(LoanError, match="NIXL does not start on lo: its process has ended"):
        Couriers("lo", (str(program),)).try_out()


@pytest.mark.skipif(_HAS_NIXL, reason="nixl is installed")
def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(LoanError, match="pip install"):
        Couriers("lo")


@pytest.mark.skipif(not _HAS_NIXL, reason="no nixl")
def test_a_network_that_is_not_there_is_told() -> None:
    with pytest.raises(LoanError, match="NIXL does not start on nonesuch9"):
        Couriers("nonesuch9").try_out()


@pytest.mark.parametrize(
    "memory",
    [
        b"\xc1",
        msgspec.msgpack.encode((b"", 0, 3, 1 << 30)),
        msgspec.msgpack.encode((b"", 1 << 63, 3, 1 << 30)),
        msgspec.msgpack.encode((b"", 4096, 0, 1 << 30)),
        msgspec.msgpack.encode((b"", 4096, 3, PAGE_BYTES - 1)),
    ],
)
def test_what_is_no_memory_is_refused(memory: bytes) -> None:
    station: Any = SimpleNamespace(staged_pages=32, store=Pool(1))
    unused: Any = None
    with pytest.raises(LoanError, match="no memory"):
        StagedLoan(station, unused, unused, memory)


@pytest.mark.parametrize(
    "order",
    [Gather(3, [1]), Gather(0, []), Gather(0, [NUM_PAGES]), Gather(0, [1] * 33), Ack()],
)
def test_who_has_something_else_staged_is_dropped(order: Gather | Ack, tmp_path: Path) -> None:
    prefill = Side(1, (STAND_IN, str(tmp_path)), listens=True)
    forger = Forger(prefill, DECODE)
    forger.respond()
    forger.read()
    forger.send(Lend())
    assert isinstance(wire.decode_from_prefill(forger.read()), Lent)
    forger.send(Gather(2, [1, NUM_PAGES - 1]))
    assert wire.decode_from_prefill(forger.read()) == Gathered(2)
    forger.send(order)
    assert forger.is_dropped()
    assert prefill.transfer.counters.num_dropped == 1
    prefill.transfer.close()
