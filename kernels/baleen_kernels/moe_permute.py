"""The way of tokens to their experts and back, around the grouped matrix products of `grouped_gemm`.

Legend: T tokens, k picks of each, E experts, M rows of a box, R rows of all segments, N channels, G groups of 128.

moe_boxes: where each pick's row lies if every expert has a box of M rows: e * M + how many earlier tokens picked e.
  expert_ids [T, k] int64, no id twice in a row; M at least T -> places [T, k] int64, counts [E] int32.
moe_segments: where it lies if experts follow each other, each in whole segments of 128 rows. How many rows that takes
  is known on the device alone, so there are as many as there might be.
  expert_ids as above -> places [T, k] int64, expert_of_row [R] int32, -1 in rows without one, R = `segment_rows`.
moe_scatter: copies each token's FP8 numbers and scales to its places. values [T, N] float8_e4m3fn, scales [T, G]
  float32, places [T, k] -> [B, M, N] and [B, M, G], B boxes; rows that nothing is copied to mean nothing. The scales
  have strides (G * M', 1, M'), M' being M rounded up to a multiple of four: what matrix products load.
moe_combine: out[t] = sum_j weights[t, j] * rows[places[t, j]] + shared[t], in float32, j ascending.
  rows [B * M, N], shared [T, N] of one dtype, weights [T, k] float32 -> [T, N] of that dtype. Without places, pick j of
  token t lies in row t * k + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant
from baleen_kernels.grouped_gemm import SEGMENT
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_experts: int
    topk: int
    width: int = 256
    dtype: torch.dtype = torch.bfloat16
    in_order: bool = False


CASES = (
    Case("one_token", 1, 256, 8),
    Case("spread", 20, 256, 8),
    Case("crowded", 40, 8, 4),
    Case("all_experts", 5, 4, 4, width=384),
    Case("float32", 6, 16, 2, dtype=torch.float32),
)
SEGMENT_CASES = (*CASES, Case("many", 700, 16, 4))
COMBINE_CASES = (*CASES, Case("in_order", 5, 16, 8, in_order=True))


def _expert_ids(case: Case) -> Tensor:
    g = torch.Generator().manual_seed(case.num_tokens)
    return torch.rand(case.num_tokens, case.num_experts, generator=g).argsort(-1)[:, : case.topk]


def segment_rows(num_picks: int, num_experts: int) -> int:
    """R: rows that `num_picks` picks of `num_experts` experts can take at most."""
    room = num_picks + min(num_picks, num_experts) * (SEGMENT - 1)
    return -(-room // SEGMENT) * SEGMENT


def _ranks(flat: Tensor, counts: Tensor) -> Tensor:
    """For ids [n] and how often each occurs: how many earlier places hold the same id."""
    order = flat.sort(stable=True).indices
    first = (counts.cumsum(0) - counts)[flat[order]]
    ranks = torch.empty_like(flat)
    ranks[order] = torch.arange(flat.numel(), device=flat.device) - first
    return ranks


def _counts(flat: Tensor, num_experts: int) -> Tensor:
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))


def make_box_inputs(case: Case) -> dict[str, Any]:
    """Random picks; boxes with some room to spare."""
    return {"expert_ids": _expert_ids(case), "num_experts": case.num_experts, "room": case.num_tokens + 3}


def boxes_reference(expert_ids: Tensor, *, num_experts: int, room: int) -> tuple[Tensor, Tensor]:
    """The contract, pick by pick."""
    counts = [0] * num_experts
    places = torch.empty_like(expert_ids)
    for token, picks in enumerate(expert_ids.tolist()):
        for column, expert in enumerate(picks):
            places[token, column] = expert * room + counts[expert]
            counts[expert] += 1
    return places, torch.tensor(counts, dtype=torch.int32)


BOXES_OP = Op("moe_boxes", boxes_reference, CASES, make_box_inputs, atol=0, rtol=0)


@BOXES_OP.backend("torch")
def _boxes_torch(expert_ids: Tensor, *, num_experts: int, room: int) -> tuple[Tensor, Tensor]:
    flat = expert_ids.flatten()
    counts = _counts(flat, num_experts)
    return (flat * room + _ranks(flat, counts)).view_as(expert_ids), counts.int()


@BOXES_OP.backend("triton", needs=TRITON)
def _boxes_triton(expert_ids: Tensor, *, num_experts: int, room: int) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import moe_permute as own

    return own.boxes(expert_ids, num_experts=num_experts, room=room)


def moe_boxes(expert_ids: Tensor, *, num_experts: int, room: int, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring. ValueError if a box could overflow."""
    if room < expert_ids.shape[0]:
        raise ValueError(f"boxes of {room} rows do not hold {expert_ids.shape[0]} tokens of one expert")
    return BOXES_OP.pick(backend)(expert_ids, num_experts=num_experts, room=room)


def make_segment_inputs(case: Case) -> dict[str, Any]:
    """Random picks."""
    return {"expert_ids": _expert_ids(case), "num_experts": case.num_experts}


def segments_reference(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """The contract, expert by expert."""
    places = torch.empty_like(expert_ids)
    owners: list[int] = []
    for expert in range(num_experts):
        picks = (expert_ids == expert).nonzero().tolist()
        for token, column in picks:
            places[token, column] = len(owners)
            owners.append(expert)
        owners += [-1] * (-len(owners) % SEGMENT)
    owners += [-1] * (segment_rows(expert_ids.numel(), num_experts) - len(owners))
    return places, torch.tensor(owners, dtype=torch.int32)


SEGMENTS_OP = Op("moe_segments", segments_reference, SEGMENT_CASES, make_segment_inputs, atol=0, rtol=0)


@SEGMENTS_OP.backend("torch")
def _segments_torch(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    flat = expert_ids.flatten()
    counts = _counts(flat, num_experts)
    room = (counts + SEGMENT - 1) // SEGMENT * SEGMENT
    places = (room.cumsum(0) - room)[flat] + _ranks(flat, counts)
    num_rows = segment_rows(flat.numel(), num_experts)
    expert_of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=flat.device)
    expert_of_row[places] = flat.int()
    return places.view_as(expert_ids), expert_of_row


def _rejects_odd_counts(num_experts: int, **_: Any) -> str | None:
    return f"it counts a power of two of experts, not {num_experts}" if num_experts & (num_experts - 1) else None


@SEGMENTS_OP.backend("triton", needs=TRITON, rejects=_rejects_odd_counts)
def _segments_triton(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import moe_permute as own

    num_rows = segment_rows(expert_ids.numel(), num_experts)
    return own.segments(expert_ids, num_experts=num_experts, num_rows=num_rows, segment=SEGMENT)


def moe_segments(expert_ids: Tensor, *, num_experts: int, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return SEGMENTS_OP.pick(backend)(expert_ids, num_experts=num_experts)


def make_scatter_inputs(case: Case) -> dict[str, Any]:
    """Random rows on their way to boxes."""
    g = torch.Generator().manual_seed(0)
    ids = _expert_ids(case)
    room = case.num_tokens + 3
    values, scales = fp8_quant.quantize_groups(torch.randn(len(ids), case.width, generator=g), scale_ue8m0=True)
    places = boxes_reference(ids, num_experts=case.num_experts, room=room)[0]
    return {"values": values, "scales": scales, "places": places, "num_boxes": case.num_experts, "room": room}


def scatter_reference(
    values: Tensor, scales: Tensor, places: Tensor, *, num_boxes: int, room: int
) -> tuple[Tensor, Tensor]:
    """The contract, pick by pick."""
    rows = torch.zeros(num_boxes * room, values.shape[1], dtype=values.dtype)
    row_scales = torch.zeros(num_boxes * room, scales.shape[1])
    for token, to in enumerate(places.tolist()):
        for place in to:
            rows[place], row_scales[place] = values[token], scales[token]
    return rows.view(num_boxes, room, -1), row_scales.view(num_boxes, room, -1)


def scatter_canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    rows, row_scales, *rest = outputs
    unused = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    unused.view(-1)[inputs["places"].flatten()] = False
    cleared = rows.view(torch.uint8).masked_fill(unused[..., None], 0).view(rows.dtype)
    return [cleared, row_scales.masked_fill(unused[..., None], 0.0), *rest]


SCATTER_OP = Op(
    "moe_scatter", scatter_reference, CASES, make_scatter_inputs, atol=0, rtol=0, canonical=scatter_canonical
)


@SCATTER_OP.backend("torch")
def _scatter_torch(
    values: Tensor, scales: Tensor, places: Tensor, *, num_boxes: int, room: int
) -> tuple[Tensor, Tensor]:
    flat, topk = places.flatten(), places.shape[1]
    rows = torch.zeros(num_boxes * room, values.shape[1], dtype=torch.uint8, device=values.device)
    rows[flat] = values.view(torch.uint8).repeat_interleave(topk, 0)
    box_scales = torch.ones(num_boxes, scales.shape[1], -(-room // 4) * 4, device=values.device).transpose(1, 2)
    box_scales[flat // room, flat % room] = scales.repeat_interleave(topk, 0)
    return rows.view(values.dtype).view(num_boxes, room, -1), box_scales[:, :room]


@SCATTER_OP.backend("triton", needs=TRITON)
def _scatter_triton(
    values: Tensor, scales: Tensor, places: Tensor, *, num_boxes: int, room: int
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import moe_permute as own

    return own.scatter(values, scales, places, num_boxes=num_boxes, room=room)


def moe_scatter(
    values: Tensor, scales: Tensor, places: Tensor, *, num_boxes: int, room: int, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return SCATTER_OP.pick(backend)(values, scales, places, num_boxes=num_boxes, room=room)


def make_combine_inputs(case: Case) -> dict[str, Any]:
    """Random results; NaN in rows that belong to nobody."""
    g = torch.Generator().manual_seed(0)
    ids = _expert_ids(case)
    places = boxes_reference(ids, num_experts=case.num_experts, room=case.num_tokens)[0]
    if case.in_order:
        places = torch.arange(ids.numel()).view(ids.shape)
    rows = torch.full((case.num_experts * case.num_tokens, case.width), torch.nan)
    rows[places.flatten()] = torch.randn(places.numel(), case.width, generator=g)
    return {
        "rows": rows.to(case.dtype),
        "places": None if case.in_order else places,
        "weights": torch.rand(ids.shape, generator=g),
        "shared": torch.randn(len(ids), case.width, generator=g).to(case.dtype),
    }


def _in_order(weights: Tensor) -> Tensor:
    return torch.arange(weights.numel(), device=weights.device).view(weights.shape)


def combine_reference(rows: Tensor, places: Tensor | None, weights: Tensor, shared: Tensor) -> Tensor:
    """The contract, pick by pick."""
    places = _in_order(weights) if places is None else places
    out = torch.zeros(shared.shape)
    for column in range(places.shape[1]):
        out += weights[:, column, None] * rows[places[:, column]].float()
    return (out + shared.float()).to(shared.dtype)


COMBINE_OP = Op("moe_combine", combine_reference, COMBINE_CASES, make_combine_inputs)


@COMBINE_OP.backend("torch")
def _combine_torch(rows: Tensor, places: Tensor | None, weights: Tensor, shared: Tensor) -> Tensor:
    places = _in_order(weights) if places is None else places
    out = torch.zeros(shared.shape, dtype=torch.float32, device=shared.device)
    for column in range(places.shape[1]):
        out += weights[:, column, None] * rows[places[:, column]].float()
    return (out + shared.float()).to(shared.dtype)


@COMBINE_OP.backend("triton", needs=TRITON)
def _combine_triton(rows: Tensor, places: Tensor | None, weights: Tensor, shared: Tensor) -> Tensor:
    from baleen_kernels.own import moe_permute as own

    return own.combine(rows, places, weights, shared)


def moe_combine(
    rows: Tensor, places: Tensor | None, weights: Tensor, shared: Tensor, *, backend: str = "torch"
) -> Tensor:
    """See the module docstring."""
    return COMBINE_OP.pick(backend)(rows, places, weights, shared)
