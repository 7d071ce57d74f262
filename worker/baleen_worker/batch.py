"""Turns a step plan into the tensors of one forward pass. Owns what the device remembers of each slot: its page table
and the token it sampled last.

Legend: S request slots, P pages of the longest request, T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from baleen_worker.model.context import ForwardContext, ForwardRow
from baleen_worker.staging import list_to_device, to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baleen_worker.step import PlannedRow


class PageTables:
    """[S + 1, P] int32 on the device: the pages of each slot in order. Steps extend it, nothing rebuilds it.

    What lies beyond a slot's pages is left over from earlier requests and never read. The last row is nobody's: all its
    pages are the sink.
    """

    def __init__(self, num_slots: int, max_pages: int, *, device: torch.device) -> None:
        self.tensor = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)

    def extend(self, rows: Sequence[PlannedRow]) -> None:
        """Enters the new pages of all rows, in one copy to the device."""
        grown = [row for row in rows if row.new_pages]
        if not grown:
            return
        width = self.tensor.shape[1]
        for row in grown:
            last = row.first_new_page + len(row.new_pages)
            if last > width:
                raise ValueError(f"slot {row.slot} is granted {last} pages, but a request has at most {width}")
        counts = [len(row.new_pages) for row in grown]
        entries = np.empty((3, sum(counts)), dtype=np.int64)
        entries[0] = np.repeat([row.slot for row in grown], counts)
        entries[1] = _ranges([row.first_new_page for row in grown], counts)
        entries[2] = [page for row in grown for page in row.new_pages]
        slots, places, pages = to_device(entries, self.tensor.device)
        self.tensor[slots, places] = pages.int()


class LastTokens:
    """[S + 1] int64 on the device: the token that each slot sampled last, so that the next step need not wait for it.

    The last place is nobody's.
    """

    def __init__(self, num_slots: int, *, device: torch.device) -> None:
        self.tensor = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def keep(self, rows: Sequence[PlannedRow], token_ids: Tensor) -> None:
        """token_ids [N]: one sampled token for each of N rows."""
        slots = list_to_device([row.slot for row in rows], torch.int64, self.tensor.device)
        self.tensor[slots] = token_ids

    def fill(self, rows: Sequence[PlannedRow], starts: Sequence[int], input_ids: Tensor) -> None:
        """Puts the tokens of rows that take theirs from here into input_ids [T], where those rows start."""
        taking = [index for index, row in enumerate(rows) if row.from_device]
        if not taking:
            return
        entries = np.array([[starts[index] for index in taking], [rows[index].slot for index in taking]])
        places, slots = to_device(entries, self.tensor.device)
        input_ids[places] = self.tensor[slots]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. input_ids: [T] int64. starts: where each planned row begins among the T tokens."""

    input_ids: Tensor
    context: ForwardContext
    starts: Sequence[int]


def make_batch(rows: Sequence[PlannedRow], tables: PageTables, last_tokens: LastTokens, page_size: int) -> Batch:
    """The batch of all rows, in their order. Their new pages are already in the tables."""
    device = tables.tensor.device
    counts = [row.num_tokens for row in rows]
    starts = [0, *accumulate(counts)]
    host = np.empty((3, starts[-1]), dtype=np.int64)
    host[0] = [token_id for row in rows for token_id in row.token_ids or (0,)]
    host[1] = _ranges([row.start for row in rows], counts)
    host[2] = np.repeat([row.slot for row in rows], counts)
    input_ids, positions, slots = to_device(host, device)
    last_tokens.fill(rows, starts, input_ids)
    kv_slots = tables.tensor[slots, positions // page_size].long() * page_size + positions % page_size
    forward_rows = [_forward_row(row, start, tables, page_size) for row, start in zip(rows, starts[:-1], strict=True)]
    return Batch(input_ids, ForwardContext(positions, kv_slots, forward_rows, page_size), starts)


def _forward_row(row: PlannedRow, start: int, tables: PageTables, page_size: int) -> ForwardRow:
    num_tokens = row.num_tokens
    context_len = row.start + num_tokens
    return ForwardRow(
        start=start,
        num_tokens=num_tokens,
        context_len=context_len,
        page_table=tables.tensor[row.slot, : -(-context_len // page_size)],
        is_prefill=num_tokens > 1 or row.output_index == 0,
    )


def _ranges(firsts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """first, first + 1, … count times, for each pair, end to end."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(counts) else 0
    return np.arange(total) + np.repeat(np.asarray(firsts, dtype=np.int64) - (ends - counts), counts)
