"""A step being planned, then in flight: its rows and, beside each, the sequence it belongs to. Owned by the scheduler.

Making a row is all that happens here; who gets one is decided in `planning.py`. A slot is nobody else's until every
step that refers to it has landed, so rows in columns find their sequences by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baleen_worker.sequence import Sequence, State, admission_of
from baleen_worker.step import Admission, PlannedRow, StepPlan
from baleen_worker.step_columns import DecodeColumns, PlannedRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baleen_worker.slots import Bools, Ints, SlotColumns


class Draft:
    """`budget`: tokens that the step may still take. `decodes` are rows in columns, `others` one by one.

    `is_decoded` [slots] says which slots have a row in `decodes`.
    """

    __slots__ = ("_columns", "admissions", "budget", "decodes", "is_decoded", "others", "rows", "sequences")

    def __init__(self, budget: int, columns: SlotColumns) -> None:
        self._columns = columns
        self.budget = budget
        self.decodes: DecodeColumns | None = None
        self.is_decoded: Bools = columns.decodes
        self.others: list[PlannedRow] = []
        self.sequences: list[Sequence] = []
        self.admissions: list[Admission] = []
        self.rows: PlannedRows | list[PlannedRow] = self.others

    def admit(self, sequence: Sequence) -> None:
        """The sequence has just got its slot."""
        self.admissions.append(admission_of(sequence))

    def add_decodes(self, ready: Bools) -> None:
        """A row each for slots that have a page for it: computes the token sampled last, known or not. Called once."""
        columns = self._columns
        plain = ready & columns.is_plain
        slots = plain.nonzero()[0]
        if len(slots):
            self.decodes = self._take_columns(slots)
            self.is_decoded = plain
            columns.plan_token(plain)
            self.rows = PlannedRows(self.decodes, self.others)
            self.budget -= len(slots)
        if len(slots) < np.count_nonzero(ready):
            for slot in (ready & ~plain).nonzero()[0].tolist():
                self._add_decode(columns.at(slot))

    def _take_columns(self, slots: Ints) -> DecodeColumns:
        columns = self._columns
        starts = columns.num_planned[slots]
        bound, num_pages = columns.num_bound[slots], columns.num_pages[slots]
        new_pages: dict[int, list[int]] = {}
        grown = (bound != num_pages).nonzero()[0]
        if len(grown):
            grown_slots = slots[grown]
            columns.num_bound[grown_slots] = num_pages[grown]
            for place, slot, first in zip(grown.tolist(), grown_slots.tolist(), bound[grown].tolist(), strict=True):
                new_pages[place] = columns.at(slot).pages[first:]
        token_ids = columns.last_token[slots]
        token_ids[columns.num_pending[slots] > 0] = -1
        return DecodeColumns(
            slots=slots,
            starts=starts,
            token_ids=token_ids,
            output_indices=starts - columns.last_prompt[slots],
            first_new_page=bound,
            new_pages=new_pages,
        )

    def _add_decode(self, sequence: Sequence) -> None:
        start = sequence.num_planned
        bound = sequence.num_bound
        from_device = sequence.num_pending > 0
        row = PlannedRow(
            sequence.slot,
            start,
            () if from_device else sequence.token_ids[start:].tolist(),
            bound,
            sequence.pages[bound:],
            True,
            start + 1 - sequence.num_prompt,
            mask=b"" if sequence.guide is None else sequence.next_mask,
            from_device=from_device,
        )
        self._add(sequence, row, 1)

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """A row for the next `length` known tokens; samples when they are the last."""
        start = sequence.num_planned
        end = start + length
        bound = sequence.num_bound
        sample = end == sequence.num_tokens < sequence.max_len
        row = PlannedRow(
            slot=sequence.slot,
            start=start,
            token_ids=sequence.token_ids[start:end].tolist(),
            first_new_page=bound,
            new_pages=sequence.pages[bound:],
            sample=sample,
            output_index=sequence.num_output,
            mask=sequence.next_mask if sample else b"",
            score_token_ids=_to_score(sequence, start, end),
        )
        self._add(sequence, row, length)

    def _add(self, sequence: Sequence, row: PlannedRow, num_tokens: int) -> None:
        columns, slot = self._columns, sequence.slot
        columns.num_bound[slot] = len(sequence.pages)
        columns.num_planned[slot] += num_tokens
        columns.num_pending[slot] += row.sample
        columns.num_in_flight[slot] += 1
        self.others.append(row)
        self.sequences.append(sequence)
        self.budget -= num_tokens

    def pairs(self) -> Iterator[tuple[PlannedRow, Sequence]]:
        """Every row and whose it is."""
        num_decodes = 0 if self.decodes is None else len(self.decodes)
        for index, row in enumerate(self.rows):
            yield row, self._columns.at(row.slot) if index < num_decodes else self.sequences[index - num_decodes]

    def rows_alone(self, plan: StepPlan) -> dict[int, StepPlan]:
        """Each row as a step of its own, by row index, its token known; rows of requests that are over are left out.

        A request whose sampling has a memory brings it along, since the runner's may be ahead by now.
        """
        admissions = {admission.slot: admission for admission in plan.admissions}
        alone: dict[int, StepPlan] = {}
        for index, (row, sequence) in enumerate(self.pairs()):
            if sequence.state is State.FINISHED:
                continue
            if row.from_device:
                token_ids = sequence.token_ids[row.start : row.start + 1].tolist()
                row = msgspec.structs.replace(row, token_ids=token_ids, from_device=False)
            admission = admissions.get(row.slot)
            if admission is None and sequence.request.sampling.needs_history:
                admission = msgspec.structs.replace(admission_of(sequence), resumes=True)
            alone[index] = StepPlan(plan.step, [] if admission is None else [admission], [row])
        return alone


def _to_score(sequence: Sequence, start: int, end: int) -> list[int]:
    """Prompt tokens after those in the row, when the row is the first to compute their logits."""
    if sequence.request.sampling.prompt_logprobs is None or start < sequence.num_scored:
        return []
    sequence.num_scored = end
    return sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt)].tolist()
