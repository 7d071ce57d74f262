"""Copies pages between two sets of stores that are laid out alike, all stores at once.

source [B] uint8, source_stores [S, 2] int64: where in it each store's first page begins, and the bytes of its pages,
both multiples of 16; source_pages [N] int64; target, target_stores and target_pages likewise, with the same bytes a
page. In place: page target_pages[i] of the target gets the bytes of page source_pages[i] of the source in every store.
No page of the target is named twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.page_digest import ALIGNMENT, WORD_BYTES, count_of, make_memory, make_stores
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    """`page_bytes` of each store; the source has `num_pages`, the target two more."""

    name: str
    page_bytes: tuple[int, ...]
    num_pages: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]


CASES = (
    Case("two_stores", (80, 48), 5, (1, 4, 2), (6, 0, 1)),
    Case("larger_than_a_block", (16_656, 16), 2, (1, 0), (0, 3)),
    Case("more_tasks_than_programs", (16,) * 50, 4, (0, 1, 2, 3), (3, 2, 1, 0)),
    Case("a_page_to_two", (32,), 2, (1, 1), (2, 3)),
    Case("nothing", (16,), 2, (), ()),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random pages on both sides."""
    return {
        "source": make_memory(case.page_bytes, case.num_pages, seed=1),
        "source_stores": make_stores(case.page_bytes, case.num_pages),
        "source_pages": torch.tensor(case.source_pages, dtype=torch.int64),
        "target": make_memory(case.page_bytes, case.num_pages + 2, seed=2),
        "target_stores": make_stores(case.page_bytes, case.num_pages + 2),
        "target_pages": torch.tensor(case.target_pages, dtype=torch.int64),
    }


def reference(
    source: Tensor,
    source_stores: Tensor,
    source_pages: Tensor,
    target: Tensor,
    target_stores: Tensor,
    target_pages: Tensor,
) -> None:
    """The contract, page by page."""
    for (start, size), (target_start, _) in zip(source_stores.tolist(), target_stores.tolist(), strict=True):
        for read, written in zip(source_pages.tolist(), target_pages.tolist(), strict=True):
            target[target_start + written * size :][:size] = source[start + read * size :][:size]


OP = Op("page_copy", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    source: Tensor,
    source_stores: Tensor,
    source_pages: Tensor,
    target: Tensor,
    target_stores: Tensor,
    target_pages: Tensor,
) -> None:
    for (start, size), (target_start, _) in zip(source_stores.tolist(), target_stores.tolist(), strict=True):
        within = torch.arange(size, device=source.device)
        places = target_start + target_pages[:, None] * size + within
        target[places] = source[start + source_pages[:, None] * size + within]


def _rejects_triton(source_stores: Tensor, target_stores: Tensor, **_: Tensor) -> str | None:
    aligned = not bool((source_stores % ALIGNMENT).any() or (target_stores % ALIGNMENT).any())
    return None if aligned else "stores and pages must be multiples of 16 bytes"


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(
    source: Tensor,
    source_stores: Tensor,
    source_pages: Tensor,
    target: Tensor,
    target_stores: Tensor,
    target_pages: Tensor,
) -> None:
    from baleen_kernels.own import pages as own

    words = source_stores[:, 1] // WORD_BYTES
    sources, targets = source.data_ptr() + source_stores[:, 0], target.data_ptr() + target_stores[:, 0]
    own.copy(count_of(source_pages), sources, source_pages, targets, target_pages, words)


def page_copy(
    source: Tensor,
    source_stores: Tensor,
    source_pages: Tensor,
    target: Tensor,
    target_stores: Tensor,
    target_pages: Tensor,
    *,
    backend: str = "torch",
) -> None:
    """See the module docstring."""
    OP.pick(backend)(source, source_stores, source_pages, target, target_stores, target_pages)
