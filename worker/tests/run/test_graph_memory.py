"""What is set aside for graphs, on a device that is made up: what is loaded once is not memory of graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
from baleen_worker import runner
from baleen_worker.memory_account import MemoryAccount, expected_graph_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB, GIB = 1 << 20, 1 << 30
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass
class Device:
    """Memory that is gone for good, and that of living graphs."""

    loaded: set[object] = field(default_factory=set[object])
    living: list[Graphs] = field(default_factory=list["Graphs"])
    gone: int = 0

    def load(self, what: object, size: int) -> None:
        """Takes memory the first time."""
        self.gone += 0 if what in self.loaded else size
        self.loaded.add(what)

    def free_bytes(self) -> int:
        return 100 * GIB - self.gone - sum(graphs.taken for graphs in self.living)


class Graphs:
    """Kernels of every size take 1 GiB, the first capture 9 GiB; a size's graphs 200 MiB for the first, then 10."""

    sizes = SIZES

    def __init__(self, device: Device) -> None:
        self._device, self.taken = device, 0
        self._device.living = [self]  # nobody keeps two

    def rehearse(self) -> None:
        for size in self.sizes:
            self._device.load(size, GIB)

    def prepare(self, sizes: Sequence[int]) -> None:
        self._device.load("capture", 9 * GIB)
        for size in sizes:
            self._device.load(size, GIB)
            self.taken += (10 if self.taken else 200) * MIB


def test_what_is_loaded_once_is_not_set_aside_again() -> None:
    device = Device()
    expected = runner._measure_graphs(cast("Any", lambda: Graphs(device)), device.free_bytes)
    assert device.gone == (9 + len(SIZES)) * GIB, "what any size loads is gone before pages are counted"
    everything = Graphs(device)
    free = device.free_bytes()
    everything.prepare(sorted(SIZES, reverse=True))
    takes = free - device.free_bytes()
    assert takes == 270 * MIB
    assert takes < expected < 1.2 * takes


def test_nothing_is_set_aside_where_there_are_no_graphs() -> None:
    assert runner._measure_graphs(lambda: None, lambda: pytest.fail("nobody asks")) == 0


def test_every_size_but_the_largest_takes_what_the_measured_ones_took() -> None:
    expected = expected_graph_bytes(1000, 30, num_others=3, num_sizes=31)
    assert expected == pytest.approx(1.15 * 1300, abs=1)


def test_one_size_is_expected_to_take_what_it_took_with_a_margin() -> None:
    assert expected_graph_bytes(1000, 0, num_others=0, num_sizes=1) == pytest.approx(1150, abs=1)


def test_memory_that_others_gave_back_meanwhile_is_not_subtracted() -> None:
    assert expected_graph_bytes(-500, -30, num_others=3, num_sizes=31) == 0
    assert expected_graph_bytes(1000, -30, num_others=3, num_sizes=31) == pytest.approx(1150, abs=1)


def test_the_account_names_what_nothing_else_accounts_for() -> None:
    account = MemoryAccount(
        139 * GIB,
        weights_bytes=96 * GIB,
        unused_bytes=2 * GIB,
        kv_bytes=20 * GIB,
        kv_tokens=280_000,
        graph_bytes=GIB // 4,
        expected_graph_bytes=GIB // 2,
        workspace_bytes=4 * GIB,
        free_after=16 * GIB,
    )
    lines = account.lines()
    assert "  graphs        0.25 GiB, 0.50 GiB were set aside" in lines
    assert "  unused        2.00 GiB, of blocks that are in use" in lines
    assert "  other         4.75 GiB, kernels and libraries" in lines
