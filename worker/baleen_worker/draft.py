"""A step being planned, then in flight: its rows and, beside each, the sequence it belongs to. Owned by the scheduler.

Making a row is all that happens here; who gets one is decided in the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baleen_worker.sequence import Sequence, State, admission_of
from baleen_worker.step import Admission, PlannedRow, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable


class Draft:
    """`budget`: tokens that the step may still take."""

    __slots__ = ("admissions", "budget", "rows", "sequences")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[PlannedRow] = []
        self.sequences: list[Sequence] = []
        self.admissions: list[Admission] = []

    def admit(self, sequence: Sequence) -> None:
        """The sequence has just got its slot."""
        self.admissions.append(admission_of(sequence))

    def add_decodes(self, sequences: Iterable[Sequence]) -> None:
        """A row each for sequences that have a page for it: computes the token sampled last, known or not."""
        rows = self.rows
        first_row = len(rows)
        for sequence in sequences:
            start = sequence.num_planned
            bound = sequence.num_bound
            pages = sequence.pages
            new_pages = ()
            if bound != len(pages):
                new_pages = pages[bound:]
                sequence.num_bound = len(pages)
            from_device = sequence.num_pending > 0
            rows.append(
                PlannedRow(
                    sequence.slot,
                    start,
                    () if from_device else sequence.token_ids[start:],
                    bound,
                    new_pages,
                    True,
                    start + 1 - sequence.num_prompt,
                    mask=b"" if sequence.guide is None else sequence.next_mask,
                    from_device=from_device,
                )
            )
            sequence.num_planned = start + 1
            sequence.num_pending += 1
            sequence.num_in_flight += 1
            self.sequences.append(sequence)
        self.budget -= len(rows) - first_row

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """A row for the next `length` known tokens; samples when they are the last."""
        start, end = sequence.num_planned, sequence.num_planned + length
        bound = sequence.num_bound
        sample = end == len(sequence.token_ids) < sequence.max_len
        row = PlannedRow(
            slot=sequence.slot,
            start=start,
            token_ids=sequence.token_ids[start:end],
            first_new_page=bound,
            new_pages=sequence.pages[bound:],
            sample=sample,
            output_index=sequence.num_output,
            mask=sequence.next_mask if sample else b"",
            score_token_ids=_to_score(sequence, start, end),
        )
        sequence.num_bound = len(sequence.pages)
        sequence.num_planned = end
        sequence.num_pending += sample
        sequence.num_in_flight += 1
        self.rows.append(row)
        self.sequences.append(sequence)
        self.budget -= length

    def rows_alone(self, plan: StepPlan) -> dict[int, StepPlan]:
        """Each row as a step of its own, by row index, its token known; rows of requests that are over are left out.

        A request whose sampling has a memory brings it along, since the runner's may be ahead by now.
        """
        admissions = {admission.slot: admission for admission in plan.admissions}
        alone: dict[int, StepPlan] = {}
        for index, (row, sequence) in enumerate(zip(self.rows, self.sequences, strict=True)):
            if sequence.state is State.FINISHED:
                continue
            if row.from_device:
                token_ids = sequence.token_ids[row.start : row.start + 1]
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
    return sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt)]
