"""Selection by index score, as physical slots: `index_topk` and the way from positions to the pools, in one step.

Row t sees the first lengths[t] scores of its row from starts[t] on (from 0 without `starts`). It selects the k largest,
ties and NaN as in `index_topk`: the lower position wins, -0.0 equals 0.0, NaN equals infinity. A selected position p
becomes page_tables[table_rows[t], p // 64] * 64 + p % 64; without `page_tables` it stays p. Without `table_rows` row t
uses page table t.

scores [T, W] float32, rows at any distance; lengths, starts, table_rows [T] int32; page_tables [S, P] int32
-> [T, k] int32 in ascending order of position, padded with -1 at the end. What scores hold elsewhere is ignored; they
are left alone. Equal inputs give equal outputs, order included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import index_topk
from baleen_kernels.machine import HOPPER, Needs
from baleen_kernels.registry import Op

PAGE_SIZE = 64
MAX_WIDTH = 1 << 18
# Below this many scores a block of threads gains nothing from help.
_MIN_SLICE = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """`levels`, `values`: as in `index_topk`. `ragged`: rows begin anywhere and share page tables."""

    name: str
    lengths: tuple[int, ...]
    topk: int
    levels: int = 0
    values: str = "normal"
    ragged: bool = False
    paged: bool = True


CASES = (
    Case("decode", (3000, 2048, 2049, 5000, 1, 0), 2048),
    Case("short", (1, 31, 32, 33, 63, 64), 64),
    Case("positions", (700, 65, 64, 699), 64, paged=False),
    Case("ragged", (700, 650, 64, 65, 1), 64, ragged=True),
    Case("ties", (500, 700, 333), 64, levels=3),
    Case("one_plateau", (64, 65, 127, 128, 2000), 64, levels=1),
    Case("long_plateau", (20_001, 9_000), 2048, levels=1),
    Case("plateau_at_the_boundary", (20_000, 12_345), 2048, values="plateau"),
    Case("signed_zeros", (3000, 64, 400), 64, values="signed_zeros"),
    Case("not_finite", (3000, 70, 400), 64, values="not_finite"),
    Case("long", (40_000, 33_333), 2048),
    Case("nothing_seen", (0, 0), 8),
    Case("no_tokens", (), 8),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Scores of the case's kind, garbage beyond each length, and page tables without order."""
    g = torch.Generator().manual_seed(len(case.name))
    num_tokens, width = len(case.lengths), max(case.lengths, default=1) + 37
    scores = torch.randn(num_tokens, width, generator=g)
    if case.levels:
        scores = torch.randint(0, case.levels, scores.shape, generator=g).float()
    if case.values == "plateau":
        scores = torch.where(torch.rand(scores.shape, generator=g) < 0.95, 0.0, scores)
    elif case.values == "signed_zeros":
        zeros = torch.where(torch.rand(scores.shape, generator=g) < 0.5, -0.0, 0.0)
        scores = torch.where(torch.rand(scores.shape, generator=g) < 0.99, zeros, scores)
    elif case.values == "not_finite":
        scores[:, ::40], scores[:, 1::50], scores[:, 2::90] = -torch.inf, torch.inf, torch.nan
    starts = torch.randint(0, 36, (num_tokens,), generator=g, dtype=torch.int32) if case.ragged else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    first = torch.zeros_like(lengths) if starts is None else starts
    places = torch.arange(width)
    scores[(places < first[:, None]) | (places >= (first + lengths)[:, None])] = torch.nan
    num_pages = -(-width // PAGE_SIZE)
    num_tables = 2 if case.ragged else num_tokens
    tables = 1 + torch.rand(num_tables, num_pages * 2, generator=g).argsort(-1)[:, :num_pages].int()
    return {
        "scores": scores,
        "lengths": lengths,
        "page_tables": tables if case.paged else None,
        "table_rows": torch.arange(num_tokens, dtype=torch.int32) % 2 if case.ragged else None,
        "starts": starts,
        "topk": case.topk,
    }


def reference(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor | None,
    table_rows: Tensor | None,
    starts: Tensor | None,
    *,
    topk: int,
) -> Tensor:
    """The contract, row by row."""
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if starts is None else int(starts[row])
        visible = scores[None, row, first : first + length]
        picks = index_topk.reference(visible, lengths[row : row + 1].long(), topk=topk)[0]
        for place, position in enumerate(picks[picks >= 0].tolist()):
            if page_tables is None:
                out[row, place] = position
            else:
                table = page_tables[row if table_rows is None else int(table_rows[row])]
                out[row, place] = table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    return out


OP = Op("topk_slots", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor | None,
    table_rows: Tensor | None,
    starts: Tensor | None,
    *,
    topk: int,
) -> Tensor:
    if starts is not None:
        places = starts[:, None] + torch.arange(scores.shape[1], device=scores.device)
        scores = scores.gather(1, places.clamp(max=scores.shape[1] - 1))
    picks = index_topk.index_topk(scores, lengths.long(), topk=topk)
    if page_tables is None:
        return picks
    tables = page_tables if table_rows is None else page_tables[table_rows.long()]
    pages = tables.gather(1, (picks.clamp(min=0) // PAGE_SIZE).long())
    return torch.where(picks < 0, -1, pages * PAGE_SIZE + picks % PAGE_SIZE)


def _rejects_cuda(scores: Tensor, *, topk: int, **_: Any) -> str | None:
    if scores.shape[1] > MAX_WIDTH:
        return f"rows of {scores.shape[1]} scores are longer than {MAX_WIDTH}"
    return None if scores.stride(1) == 1 else "the scores of a row must lie next to each other"


@OP.backend("cuda", needs=Needs(archs=HOPPER, arch_note="a Hopper GPU", tools=("nvcc",)), rejects=_rejects_cuda)
def _cuda(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor | None,
    table_rows: Tensor | None,
    starts: Tensor | None,
    *,
    topk: int,
) -> Tensor:
    from baleen_kernels.own import topk_slots as own

    out = torch.empty(scores.shape[0], topk, dtype=torch.int32, device=scores.device)
    if scores.shape[0]:
        own.launch(scores, lengths, page_tables, table_rows, starts, out, cluster=blocks_per_row(*scores.shape))
    return out


def blocks_per_row(num_rows: int, width: int, *, num_blocks: int = 132) -> int:
    """How many thread blocks share a row, a power of two up to 16: as many as the device has room for.

    `num_blocks`: one for each of an H200's multiprocessors.
    """
    blocks = 1
    while blocks < 16 and 2 * blocks * num_rows <= num_blocks and width > blocks * _MIN_SLICE:
        blocks *= 2
    return blocks


def topk_slots(
    scores: Tensor,
    lengths: Tensor,
    page_tables: Tensor | None,
    table_rows: Tensor | None = None,
    starts: Tensor | None = None,
    *,
    topk: int,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(scores, lengths, page_tables, table_rows, starts, topk=topk)
