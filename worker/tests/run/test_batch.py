"""A plan's rows become consecutive tokens whose slots follow the page tables, which only ever grow."""

from __future__ import annotations

import pytest
import torch
from baleen_worker.batch import LastTokens, PageTables, make_batch
from baleen_worker.step import PlannedRow

CPU = torch.device("cpu")


def row(slot: int, start: int, count: int, pages: tuple[int, list[int]] = (0, []), output_index: int = 0) -> PlannedRow:
    return PlannedRow(slot, start, list(range(100, 100 + count)), pages[0], pages[1], True, output_index)


def test_rows_follow_each_other() -> None:
    tables = PageTables(4, 8, device=CPU)
    earlier = row(3, 0, 70, (0, [9, 4]))
    tables.extend([earlier])
    rows = [row(3, 70, 1, output_index=1), row(0, 0, 3, (0, [7])), row(2, 62, 4, (0, [5, 6]))]
    tables.extend(rows)
    batch = make_batch(rows, tables, LastTokens(4, device=CPU), 64)
    assert batch.input_ids.tolist() == [100, 100, 101, 102, 100, 101, 102, 103]
    assert batch.context.positions.tolist() == [70, 0, 1, 2, 62, 63, 64, 65]
    expected = [4 * 64 + 6, 7 * 64, 7 * 64 + 1, 7 * 64 + 2, 5 * 64 + 62, 5 * 64 + 63, 6 * 64, 6 * 64 + 1]
    assert batch.context.kv_slots.tolist() == expected
    assert [(r.start, r.num_tokens, r.context_len) for r in batch.context.rows] == [(0, 1, 71), (1, 3, 3), (4, 4, 66)]
    assert [r.page_table.tolist() for r in batch.context.rows] == [[9, 4], [7], [5, 6]]
    assert [r.is_prefill for r in batch.context.rows] == [False, True, True]
    assert batch.starts == [0, 1, 4, 8]


def test_tables_grow_in_place() -> None:
    tables = PageTables(2, 4, device=CPU)
    tensor = tables.tensor
    tables.extend([row(1, 0, 64, (0, [3]))])
    tables.extend([row(1, 64, 1), row(0, 0, 1, (0, [8]))])
    tables.extend([row(1, 65, 64, (1, [5, 2]))])
    assert tables.tensor is tensor
    assert tensor.tolist() == [[8, 0, 0, 0], [3, 5, 2, 0], [0, 0, 0, 0]]  # the last is nobody's
    tables.extend([row(1, 0, 1, (0, [6]))])
    assert tensor[1].tolist() == [6, 5, 2, 0]


def test_a_request_longer_than_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 1 is granted 5 pages, but a request has at most 4"):
        PageTables(2, 4, device=CPU).extend([row(1, 0, 1, (3, [1, 2]))])


def test_a_row_may_take_the_token_that_its_slot_sampled_last() -> None:
    tables, last_tokens = PageTables(4, 8, device=CPU), LastTokens(4, device=CPU)
    first = [row(2, 0, 3, (0, [1])), row(0, 0, 2, (0, [2])), row(3, 0, 1, (0, [3]))]
    tables.extend(first)
    last_tokens.keep(first, torch.tensor([77, 88, 99]))
    later = [
        PlannedRow(3, 1, (), 1, (), True, 1, from_device=True),
        row(0, 2, 1, output_index=1),
        PlannedRow(2, 3, (), 1, (), True, 1, from_device=True),
    ]
    batch = make_batch(later, tables, last_tokens, 64)
    assert batch.input_ids.tolist() == [99, 100, 77]
    assert batch.context.positions.tolist() == [1, 2, 3]
    assert [(r.start, r.num_tokens, r.context_len) for r in batch.context.rows] == [(0, 1, 2), (1, 1, 3), (2, 1, 4)]
