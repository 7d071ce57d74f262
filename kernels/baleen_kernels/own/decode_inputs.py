"""Triton: what a decode step reads. The first program of a row finds its token and place; all copy its pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAGES = 1024  # that one program copies


@triton.jit
def _prepare(
    slots,
    positions,
    given,
    last_tokens,
    tables,
    token_ids,
    kv_slots,
    lengths,
    row_tables,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    table = tables + slot * num_pages
    entries = tl.load(table + page, mask=page < num_pages, other=0)
    tl.store(row_tables + row.to(tl.int64) * num_pages + page, entries, mask=page < num_pages)
    if tl.program_id(1) == 0:
        position = tl.load(positions + row)
        token = tl.load(given + row)
        tl.store(token_ids + row, tl.where(token < 0, tl.load(last_tokens + slot), token))
        own_page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        tl.store(kv_slots + row, own_page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(lengths + row, (position + 1).to(tl.int32))


def prepare(
    slots: Tensor, positions: Tensor, given: Tensor, last_tokens: Tensor, tables: Tensor, *, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contract and shapes as in `baleen_kernels.decode_inputs`."""
    num_rows, num_pages = slots.shape[0], tables.shape[1]
    assert tables.is_contiguous()
    assert slots.is_contiguous()
    assert positions.is_contiguous()
    assert given.is_contiguous()
    token_ids, kv_slots = torch.empty_like(slots), torch.empty_like(slots)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=slots.device)
    row_tables = torch.empty(num_rows, num_pages, dtype=torch.int32, device=slots.device)
    if num_rows:
        pages = min(_PAGES, triton.next_power_of_2(num_pages))
        _prepare[(num_rows, triton.cdiv(num_pages, pages))](
            slots,
            positions,
            given,
            last_tokens,
            tables,
            token_ids,
            kv_slots,
            lengths,
            row_tables,
            num_pages,
            PAGE_SIZE=page_size,
            PAGES=pages,
            num_warps=4,
        )
    return token_ids, kv_slots, lengths, row_tables
