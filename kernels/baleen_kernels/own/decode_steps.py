"""Triton: what a decode step reads first and leaves last. Ring entries may lie in the host's page-locked memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAGES = 1024  # that one program copies


@triton.jit
def _prepare(
    given,
    turn,
    last_tokens,
    tables,
    slots,
    positions,
    token_ids,
    kv_slots,
    lengths,
    row_tables,
    num_pages,
    ENTRIES: tl.constexpr,
    ROOM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """The first program of a row finds its token and place; all copy its pages."""
    row = tl.program_id(0)
    entry = given + tl.load(turn) % ENTRIES * (3 * ROOM) + row
    slot = tl.load(entry)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    table = tables + slot * num_pages
    entries = tl.load(table + page, mask=page < num_pages, other=0)
    tl.store(row_tables + row.to(tl.int64) * num_pages + page, entries, mask=page < num_pages)
    if tl.program_id(1) == 0:
        position, token = tl.load(entry + ROOM), tl.load(entry + 2 * ROOM)
        tl.store(slots + row, slot)
        tl.store(positions + row, position)
        tl.store(token_ids + row, tl.where(token < 0, tl.load(last_tokens + slot), token))
        own_page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        tl.store(kv_slots + row, own_page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(lengths + row, (position + 1).to(tl.int32))


def prepare(
    given: Tensor, turn: Tensor, last_tokens: Tensor, tables: Tensor, *, num_rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.decode_inputs`."""
    num_pages, device = tables.shape[1], tables.device
    assert tables.is_contiguous()
    assert given.is_contiguous()
    slots, positions, token_ids, kv_slots = torch.empty(4, num_rows, dtype=torch.int64, device=device)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=device)
    row_tables = torch.empty(num_rows, num_pages, dtype=torch.int32, device=device)
    if num_rows:
        pages = min(_PAGES, triton.next_power_of_2(num_pages))
        _prepare[(num_rows, triton.cdiv(num_pages, pages))](
            given,
            turn,
            last_tokens,
            tables,
            slots,
            positions,
            token_ids,
            kv_slots,
            lengths,
            row_tables,
            num_pages,
            ENTRIES=given.shape[0],
            ROOM=given.shape[2],
            PAGE_SIZE=page_size,
            PAGES=pages,
            num_warps=4,
        )
    return slots, positions, token_ids, kv_slots, lengths, row_tables


@triton.jit
def _keep(
    token_ids,
    finite,
    slots,
    last_tokens,
    kept,
    results,
    turn,
    num_rows,
    ENTRIES: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    present = row < num_rows
    number = tl.load(turn)
    token = tl.load(token_ids + row, mask=present, other=0)
    slot = tl.load(slots + row, mask=present, other=0)
    tl.store(last_tokens + slot, token, mask=present)
    tl.store(kept + row, token, mask=present)
    tl.store(kept + ROOM + row, slot, mask=present)
    entry = results + number % ENTRIES * (2 * ROOM) + row
    tl.store(entry, token, mask=present)
    tl.store(entry + ROOM, (tl.load(finite + row, mask=present, other=0) != 0).to(tl.int64), mask=present)
    tl.debug_barrier()
    tl.store(turn, number + 1)


def keep(
    token_ids: Tensor, finite: Tensor, slots: Tensor, last_tokens: Tensor, kept: Tensor, results: Tensor, turn: Tensor
) -> None:
    """Contract and shapes as in `baleen_kernels.decode_results`."""
    num_rows = token_ids.shape[0]
    assert results.is_contiguous()
    assert kept.is_contiguous()
    assert kept.shape[1] == results.shape[2]
    _keep[(1,)](
        token_ids,
        finite.view(torch.int8),
        slots,
        last_tokens,
        kept,
        results,
        turn,
        num_rows,
        ENTRIES=results.shape[0],
        ROOM=results.shape[2],
        BLOCK=max(32, triton.next_power_of_2(num_rows)),
        num_warps=1,
    )
