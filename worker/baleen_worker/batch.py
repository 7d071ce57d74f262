"""Turns a step plan into the tensors of one forward pass. Owns the page table of every slot on the device.

Page tables are extended by what a plan adds and never rebuilt, so a step costs the same at any context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baleen_worker.model.context import ForwardContext, ForwardRow
from baleen_worker.step import PlannedRow, StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """input_ids: [T] int64, all rows end to end. starts: where each row begins in them."""

    input_ids: Tensor
    context: ForwardContext
    starts: Sequence[int]


class PageTables:
    """[max_running_requests, max_pages] int64: element (slot, i) is the page of positions 64 i … 64 i + 63."""

    def __init__(self, max_running_requests: int, max_pages: int, *, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._table = torch.zeros(max_running_requests, max_pages, dtype=torch.int64, device=device)

    def batch(self, plan: StepPlan) -> ForwardBatch:
        """Applies the plan's new pages and lays its rows out."""
        self._extend(plan.rows)
        lens = np.fromiter((len(row.token_ids) for row in plan.rows), np.int64, len(plan.rows))
        first_positions = np.fromiter((row.start for row in plan.rows), np.int64, len(plan.rows))
        slots = np.fromiter((row.slot for row in plan.rows), np.int64, len(plan.rows))
        starts = np.cumsum(lens) - lens
        places = np.arange(int(lens.sum()))
        positions = self._to_device(places + np.repeat(first_positions - starts, lens))
        slot_of_token = self._to_device(np.repeat(slots, lens))
        pages = self._table[slot_of_token, positions // self._page_size]
        token_ids = np.concatenate([np.asarray(row.token_ids, np.int64) for row in plan.rows])
        context = ForwardContext(
            positions=positions,
            kv_slots=pages * self._page_size + positions % self._page_size,
            rows=[self._row(row, start) for row, start in zip(plan.rows, starts.tolist(), strict=True)],
            page_size=self._page_size,
        )
        return ForwardBatch(self._to_device(token_ids), context, starts.tolist())

    def _row(self, row: PlannedRow, start: int) -> ForwardRow:
        context_len = row.start + len(row.token_ids)
        return ForwardRow(
            start=start,
            num_tokens=len(row.token_ids),
            context_len=context_len,
            page_table=self._table[row.slot, : -(-context_len // self._page_size)],
            is_prefill=row.output_index == 0,
        )

    def _extend(self, rows: Sequence[PlannedRow]) -> None:
        slots: list[int] = []
        indices: list[int] = []
        pages: list[int] = []
        for row in rows:
            if row.new_pages:
                slots.extend([row.slot] * len(row.new_pages))
                indices.extend(range(row.first_new_page, row.first_new_page + len(row.new_pages)))
                pages.extend(row.new_pages)
        if pages:
            at = self._to_device(np.asarray([slots, indices, pages], np.int64))
            self._table[at[0], at[1]] = at[2]

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
