"""Absorbed latent attention over all keys of a page table: decode of models without an indexer (V3, R1).

q [T, H, C + R] bfloat16 or float32, latent part first; latents, the pool: [S, C + R] of its dtype, or packed FP8
[S, bytes] uint8 as in `latent_pack`; tables [T, P] int32: pages of 64 slots, of each row in order; lengths [T] int32:
keys of each row, at most 64 * P -> [T, H, C] of q's dtype. A row without keys gets zeros. Scores, softmax and sums in
float32. What a table holds behind its row's last page, and a page behind its row's last key, may be anything.

Equal to `mla_slots` with every slot of a row selected. Rows are cut into parts where they are few, by the width of the
table: which row ends where is known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import latent_pack, mla_slots
from baleen_kernels.machine import ANY_TRITON, HOPPER, Needs
from baleen_kernels.mla_slots import LATENT, ROPE
from baleen_kernels.registry import Op

PAGE = 64
_MOST_PARTS = 16
FLASH_MLA = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("flash_mla",))


@dataclass(frozen=True, slots=True)
class Case:
    """`spare`: pages that tables have beyond the longest row's, with impossible numbers."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int
    packed: bool = False
    spare: int = 0
    latent: int = LATENT
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("released", (1000, 64, 2049), 128),
    Case("released_packed", (1000, 64, 2049), 128, packed=True),
    Case("ragged", (1, 63, 64, 65, 700, 128), 16, spare=3),
    Case("ragged_packed", (1, 63, 64, 65, 700, 128), 16, packed=True, spare=3),
    Case("some_without_keys", (0, 5, 0, 130), 8),
    Case("nothing", (0, 0), 16),
    Case("one_key", (1,), 128),
    Case("odd_heads", (77, 300), 65),
    Case("one_long_row", (5000,), 16, spare=1),
    Case("narrow_latent", (100, 7), 4, latent=128, dtype=torch.float32),
    Case("no_rows", (), 16),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random pages in random order. Whatever may not be read is NaN, or a page that is not there."""
    g = torch.Generator().manual_seed(len(case.name))
    counts = [-(-length // PAGE) for length in case.lengths]
    num_pages, width = sum(counts) + 2, max(counts, default=0) + case.spare + 1
    latent, rope = (torch.randn(num_pages * PAGE, channels, generator=g) for channels in (case.latent, ROPE))
    if case.packed:
        latents = latent_pack.pack_latent_fp8(latent, rope, scale_ue8m0=True)
    else:
        latents = latent_pack.pack_latent_plain(latent, rope, dtype=case.dtype)
    tables = torch.full((len(counts), width), -1, dtype=torch.int32)
    used, order = torch.zeros(num_pages * PAGE, dtype=torch.bool), torch.randperm(num_pages, generator=g).int()
    for row, pages in enumerate(order[: sum(counts)].split(counts)):
        tables[row, : len(pages)] = pages
        slots = (pages.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[: case.lengths[row]]
        used[slots] = True
    latents[~used] = 0x7F if case.packed else torch.nan  # as an e4m3 number and as half of a scale, too, NaN
    return {
        "q": torch.randn(len(counts), case.num_heads, case.latent + ROPE, generator=g).to(case.dtype),
        "latents": latents,
        "tables": tables,
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "softmax_scale": 0.07,
    }


def reference(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float) -> Tensor:
    """The contract through that of `mla_slots`."""
    return mla_slots.reference(q, latents, slots_of(tables, lengths), softmax_scale=softmax_scale)


def slots_of(tables: Tensor, lengths: Tensor) -> Tensor:
    """[T, 64 * P] int32: every slot of each row in order, -1 behind its last key."""
    slots = (tables[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device=tables.device)).flatten(1)
    behind = torch.arange(slots.shape[1], device=tables.device) >= lengths[:, None]
    return slots.masked_fill(behind, -1)


OP = Op("mla_pages", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float) -> Tensor:
    slots = slots_of(tables, lengths)
    return mla_slots.mla_slots(q, latents, slots, softmax_scale=softmax_scale, backend="torch")


def parts_of(num_rows: int, num_heads: int, num_pages: int, *, num_blocks: int = 264) -> int:
    """Into how many parts the pages of each row are cut, so that few rows keep a device busy: a power of two up to 16,
    parts of four pages or more.

    A block of threads takes 64 heads of one part. `num_blocks`: two for each of an H200's multiprocessors, because rows
    end at different places.
    """
    parts, blocks = 1, num_rows * -(-num_heads // 64)
    while parts < _MOST_PARTS and 2 * parts * blocks <= num_blocks and num_pages >= 8 * parts:
        parts *= 2
    return parts


def _rejects_triton(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, **_: Any) -> str | None:
    if (tables.dtype, lengths.dtype) != (torch.int32, torch.int32):
        return f"it takes tables and lengths as int32, not {tables.dtype} and {lengths.dtype}"
    return mla_slots.portable_rejects(q, latents)


@OP.backend("triton", needs=ANY_TRITON, rejects=_rejects_triton)
def _triton(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float) -> Tensor:
    from baleen_kernels.own import merge_parts, mla_slots

    num_parts = parts_of(q.shape[0], q.shape[1], tables.shape[1])
    places = tables.contiguous(), lengths.contiguous()
    parts, sums = mla_slots.attend_pages(q.contiguous(), latents, *places, softmax_scale=softmax_scale, parts=num_parts)
    return parts[:, 0] if num_parts == 1 else merge_parts.merge(parts, sums)


def _rejects_flashmla(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, **_: Any) -> str | None:
    if q.dtype != torch.bfloat16 or latents.dtype != torch.bfloat16:
        return f"it takes bfloat16 queries and pools, not {q.dtype} and {latents.dtype}"
    if q.shape[2] != LATENT + ROPE:
        return f"it takes heads of {LATENT + ROPE} channels, not {q.shape[2]}"
    if latents.shape[0] % PAGE or (tables.dtype, lengths.dtype) != (torch.int32, torch.int32):
        return "it takes pools of whole pages, and tables and lengths as int32"
    return None


@OP.backend("flashmla", needs=FLASH_MLA, rejects=_rejects_flashmla)
def _flashmla(q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float) -> Tensor:
    from flash_mla import flash_mla_with_kvcache  # pyright: ignore[reportMissingImports]

    num_heads = q.shape[1]
    if len(q) == 0:
        return q.new_empty(0, num_heads, LATENT)
    # A row without keys, whose table may hold anything, gets one key of the pool's first page, and zeros in the end.
    present = lengths > 0
    out, _ = flash_mla_with_kvcache(
        mla_slots.with_whole_tiles(q)[:, None],
        latents.view(-1, PAGE, 1, LATENT + ROPE),
        tables.where(present[:, None], 0),
        lengths.clamp(min=1),
        LATENT,
        mla_slots.flashmla_plan(),
        softmax_scale=softmax_scale,
        use_legacy=True,  # the current kernels of this package have no dense attention
    )
    return out[:, 0, :num_heads].masked_fill_(~present[:, None, None], 0)


def mla_pages(
    q: Tensor, latents: Tensor, tables: Tensor, lengths: Tensor, *, softmax_scale: float, backend: str = "torch"
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(q, latents, tables, lengths, softmax_scale=softmax_scale)
