"""What the host and decode graphs tell each other: rows before a step, tokens after it. Owns the ring they meet in.

The ring lies in page-locked memory that the device reads and writes itself, so no copy stands between two steps. The
host fills an entry and launches the step; the device counts steps and finds the entry by that. An entry is free again
when its step's results have come, which the host makes sure of before it writes. On a CPU the ring is plain memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from baleen_kernels.decode_inputs import GIVEN_BY_SLOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from baleen_worker.step import PlannedRow

# More than the steps that are ever in flight, so that waiting for an entry is waiting for nothing.
_ENTRIES = 8

# What a row tells the graph, and what it hears.
_SLOT, _POSITION, _TOKEN = range(3)
_CHOSEN, _IS_FINITE = range(2)


class Arrival(Protocol):
    """Results of a step on their way to the host, as `staging.Fetch` is."""

    def wait(self) -> None:
        """Until they are there."""
        ...


class DecodeExchange:
    """For steps of at most `most` rows. `turn` [1] int64 counts steps on the device."""

    def __init__(self, most: int, spare_slot: int, device: torch.device) -> None:
        """`spare_slot`: of rows that are padding; it belongs to no request."""
        is_cuda = device.type == "cuda"
        self._device, self._spare_slot = device, spare_slot
        self.given = torch.zeros(_ENTRIES, 3, most, dtype=torch.int64, pin_memory=is_cuda)
        self.results = torch.zeros(_ENTRIES, 2, most, dtype=torch.int64, pin_memory=is_cuda)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._given = self.given.numpy()
        self._num_steps = 0
        self._arrivals: list[Arrival | None] = [None] * _ENTRIES

    def give(self, rows: Sequence[PlannedRow], size: int) -> None:
        """Fills the next step's entry, padded to `size` rows. Launch it next."""
        place = self._num_steps % _ENTRIES
        arrival, self._arrivals[place] = self._arrivals[place], None
        if arrival is not None:
            arrival.wait()
        self._num_steps += 1
        entry, num_rows = self._given[place], len(rows)
        entry[_SLOT, :num_rows] = [row.slot for row in rows]
        entry[_POSITION, :num_rows] = [row.start for row in rows]
        entry[_TOKEN, :num_rows] = [row.token_ids[0] if row.token_ids else GIVEN_BY_SLOT for row in rows]
        self._pad(entry[:, num_rows:size])

    def _pad(self, entry: np.ndarray) -> None:
        entry[_SLOT], entry[_POSITION:] = self._spare_slot, 0

    def results_of_last(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Greedy tokens [N] int64 and whether the logits are finite [N] bool of the step launched last, on the host.

        They hold when the step is done, and until `_ENTRIES` - 1 others were launched; on a CPU at once and for good.
        """
        entry = self.results[(self._num_steps - 1) % _ENTRIES, :, :num_rows]
        if self._device.type == "cpu":
            entry = entry.clone()
        return entry[_CHOSEN], entry[_IS_FINITE]

    def until(self, arrival: Arrival) -> None:
        """The entry of the step launched last is free when these results have come."""
        self._arrivals[(self._num_steps - 1) % _ENTRIES] = arrival

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps that are run meanwhile are padding, and are not counted."""
        self._synchronize()
        for entry in self._given:
            self._pad(entry)
        yield
        self.agree()

    def agree(self) -> None:
        """Lets the device count as the host does, whatever became of the steps since."""
        self._synchronize()
        self.turn.fill_(self._num_steps)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
