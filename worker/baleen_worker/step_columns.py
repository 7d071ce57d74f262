"""Rows of a step as columns: what makes a step of thousands of decodes cheap to plan, to run and to commit.

Both classes are sequences like any other to whoever looks at them row by row; objects are made only then.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from baleen_worker.step import PlannedRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Rows that feed one token each and sample the next, without mask or scores. Arrays of one entry a row.

    `token_ids[i]` is -1 where the row takes its token from the device. `first_new_page[i]` is the length of the row's
    page table so far, and `new_pages[i]` what extends it, for the few rows that grow.
    """

    slots: Ints
    starts: Ints
    token_ids: Ints
    output_indices: Ints
    first_new_page: Ints
    new_pages: Mapping[int, Sequence[int]]

    def __len__(self) -> int:
        return len(self.slots)

    def row(self, index: int) -> PlannedRow:
        """One of the rows."""
        token_id = int(self.token_ids[index])
        return PlannedRow(
            int(self.slots[index]),
            int(self.starts[index]),
            () if token_id < 0 else [token_id],
            int(self.first_new_page[index]),
            self.new_pages.get(index, ()),
            sample=True,
            output_index=int(self.output_indices[index]),
            from_device=token_id < 0,
        )

    def rows(self) -> Iterator[PlannedRow]:
        """All of them."""
        columns = (self.slots, self.starts, self.token_ids, self.first_new_page, self.output_indices)
        new_pages = self.new_pages
        for index, (slot, start, token_id, first_new_page, output_index) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            yield PlannedRow(
                slot,
                start,
                () if token_id < 0 else [token_id],
                first_new_page,
                new_pages.get(index, ()),
                True,
                output_index,
                from_device=token_id < 0,
            )


class PlannedRows(collections.abc.Sequence[PlannedRow]):
    """Rows of a plan: those in columns first, then the others.

    Rows are made anew each time they are asked for, so that whoever wants thousands of them pays for them, not whoever
    drops the plan: who reads them more than once makes a list.
    """

    __slots__ = ("decodes", "others")

    def __init__(self, decodes: DecodeColumns, others: Sequence[PlannedRow]) -> None:
        self.decodes = decodes
        self.others = others

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> PlannedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PlannedRow]: ...
    def __getitem__(self, index: int | slice) -> PlannedRow | list[PlannedRow]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]
        num_decodes = len(self.decodes)
        return self.decodes.row(place) if place < num_decodes else self.others[place - num_decodes]

    def __iter__(self) -> Iterator[PlannedRow]:
        yield from self.decodes.rows()
        yield from self.others


class OneTokenEach(collections.abc.Sequence[list[int]]):
    """`StepOutput.token_ids` of a step in which every row has yielded exactly one token; `column` holds them."""

    __slots__ = ("column",)

    def __init__(self, column: Ints) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [[token_id] for token_id in self.column[index].tolist()]
        return [int(self.column[index])]

    def __iter__(self) -> Iterator[list[int]]:
        return ([token_id] for token_id in self.column.tolist())
