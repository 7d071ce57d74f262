"""Feed-forward of experts that have a few tokens each: tiles of picks, and the two products over them.

A pick is one token's choice of one expert, numbered t * k + j. Where experts have few tokens, time is that of reading
their weights, and copies of tokens to boxes and back are launches for nothing: rows are read where they lie, and what
an expert returns lies where its pick is numbered.

Legend: T tokens, k picks of each, P = T * k, E experts, B tiles of 16 picks, H hidden width, I width of an expert.

moe_tiles: the picks of each expert in tiles, experts and picks ascending. How many tiles that takes is known on the
  device alone, so there are as many as there might be. expert_ids [T, k] int64, no id twice in a row ->
  tile_expert [B] int32, -1 in tiles without one, tile_picks [B, 16] int32, -1 in rows without one; B = `most_tiles`.
  Rows of tiles without an expert mean nothing.
tile_hidden: gate and up, activation and rounding. values [T, H] float8_e4m3fn, scales [T, H / 128] float32, weight
  [E, 2 I, H], gate first, and its scales as in `fp8_gemm`, tiles as above -> hidden [P, I] float8_e4m3fn, scales
  [P, I / 128] float32. Products, rounded to `dtype`, then as in `swiglu_quant`.
tile_out: down. values [P, I], scales [P, I / 128], weight [E, H, I] and its scales -> [P, H] in `dtype`.
The dtype is bfloat16 or float32. H and I are multiples of 128. Every token's results are those it has alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import fp8_gemm, fp8_quant, swiglu, swiglu_quant
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

TILE_ROWS = 16


def most_tiles(num_picks: int, num_experts: int) -> int:
    """B: tiles that `num_picks` picks of `num_experts` experts can take at most."""
    return (num_picks + (TILE_ROWS - 1) * min(num_picks, num_experts)) // TILE_ROWS


@dataclass(frozen=True, slots=True)
class Case:
    """`spread`: of how many experts tokens pick."""

    name: str
    num_tokens: int
    num_experts: int
    topk: int
    spread: int | None = None
    width: int = 256
    hidden: int = 256
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("one_token", 1, 16, 8),
    Case("spread", 20, 64, 8),
    Case("crowded", 40, 8, 4, spread=5),
    Case("whole_tiles", 32, 4, 2, spread=2),
    Case("released", 3, 2, 1, width=7168, hidden=2048),
    Case("float32", 6, 16, 2, hidden=128, dtype=torch.float32),
)


def _expert_ids(case: Case) -> Tensor:
    g = torch.Generator().manual_seed(case.num_tokens)
    return torch.rand(case.num_tokens, case.spread or case.num_experts, generator=g).argsort(-1)[:, : case.topk]


def make_tile_inputs(case: Case) -> dict[str, Any]:
    """Random picks."""
    return {"expert_ids": _expert_ids(case), "num_experts": case.num_experts}


def tiles_reference(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """The contract, expert by expert."""
    owners: list[int] = []
    rows: list[list[int]] = []
    for expert in range(num_experts):
        picks = (expert_ids.flatten() == expert).nonzero()[:, 0].tolist()
        for start in range(0, len(picks), TILE_ROWS):
            tile = picks[start : start + TILE_ROWS]
            owners.append(expert)
            rows.append(tile + [-1] * (TILE_ROWS - len(tile)))
    missing = most_tiles(expert_ids.numel(), num_experts) - len(owners)
    owners, rows = owners + [-1] * missing, rows + [[-1] * TILE_ROWS] * missing
    return torch.tensor(owners, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)


def tiles_canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with -1 where the contract says nothing."""
    del inputs
    owners, rows, *rest = outputs
    return [owners, rows.masked_fill(owners[:, None] < 0, -1), *rest]


TILES_OP = Op("moe_tiles", tiles_reference, CASES, make_tile_inputs, atol=0, rtol=0, canonical=tiles_canonical)


@TILES_OP.backend("torch")
def _tiles_torch(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    flat, device = expert_ids.flatten(), expert_ids.device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    num_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    order = flat.sort(stable=True).indices
    experts = flat[order]
    rank = torch.arange(flat.numel(), device=device) - (counts.cumsum(0) - counts)[experts]
    place = (num_tiles.cumsum(0) - num_tiles)[experts] * TILE_ROWS + rank
    most = most_tiles(flat.numel(), num_experts)
    owners = torch.full((most,), -1, dtype=torch.int32, device=device)
    rows = torch.full((most * TILE_ROWS,), -1, dtype=torch.int32, device=device)
    owners[place // TILE_ROWS] = experts.int()
    rows[place] = order.int()
    return owners, rows.view(most, TILE_ROWS)


def _rejects_odd_counts(num_experts: int, **_: Any) -> str | None:
    return f"it counts a power of two of experts, not {num_experts}" if num_experts & (num_experts - 1) else None


@TILES_OP.backend("triton", needs=TRITON, rejects=_rejects_odd_counts)
def _tiles_triton(expert_ids: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import expert_tiles as own

    return own.tiles(expert_ids, num_experts=num_experts, num_tiles=most_tiles(expert_ids.numel(), num_experts))


def moe_tiles(expert_ids: Tensor, *, num_experts: int, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return TILES_OP.pick(backend)(expert_ids, num_experts=num_experts)


def make_hidden_inputs(case: Case) -> dict[str, Any]:
    """Random tokens, weights and picks."""
    g = torch.Generator().manual_seed(case.num_tokens)
    values, scales = fp8_gemm.random_activations(case.num_tokens, case.width, g=g)
    weight, weight_scale = fp8_gemm.random_weight(case.num_experts, 2 * case.hidden, case.width, g=g)
    owners, rows = tiles_reference(_expert_ids(case), num_experts=case.num_experts)
    return {
        "values": values,
        "scales": scales,
        "weight": weight,
        "weight_scale": weight_scale,
        "tile_expert": owners,
        "tile_picks": rows,
        "picks": case.topk,
        "scale_ue8m0": True,
        "dtype": case.dtype,
    }


def hidden_reference(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    picks: int,
    scale_ue8m0: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The contract, tile by tile."""
    width = weight.shape[1] // 2
    hidden = torch.zeros(len(values) * picks, width, dtype=torch.float8_e4m3fn)
    hidden_scales = torch.zeros(len(values) * picks, width // fp8_quant.GROUP)
    for expert, rows in zip(tile_expert.tolist(), tile_picks, strict=True):
        if expert >= 0:
            mine = rows[rows >= 0].long()
            one = values[mine // picks], scales[mine // picks], weight[expert], weight_scale[expert]
            gate, up = fp8_gemm.reference(*one, dtype=dtype).chunk(2, -1)
            rounded = fp8_quant.reference(swiglu.reference(gate, up), scale_ue8m0=scale_ue8m0)
            hidden[mine], hidden_scales[mine] = rounded
    return hidden, hidden_scales


def hidden_canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The numbers that values and scales stand for: tensor cores sum FP8 products with few bits, and what rounds to
    another FP8 number for that, or to another scale, is the same number but for its last bits."""
    del inputs
    values, scales, *rest = outputs
    return [fp8_quant.dequantize_groups(values, scales), *rest]


HIDDEN_OP = Op("tile_hidden", hidden_reference, CASES, make_hidden_inputs, canonical=hidden_canonical, bf16_error=2e-2)


def _results(rows: Tensor, products: list[Tensor], num_picks: int) -> Tensor:
    """What tiles returned, each row where its pick is numbered. Rows of nobody go to a row that is cut off."""
    out = products[0].new_empty(num_picks + 1, *products[0].shape[1:])
    out[torch.where(rows < 0, num_picks, rows).flatten().long()] = torch.cat(products)
    return out[:num_picks]


@HIDDEN_OP.backend("torch")
def _hidden_torch(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    picks: int,
    scale_ue8m0: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    tokens = tile_picks.clamp(min=0).long() // picks
    products = [
        fp8_gemm.fp8_gemm(values[rows], scales[rows], weight[e], weight_scale[e], dtype=dtype)
        for e, rows in zip(tile_expert.clamp(min=0).tolist(), tokens, strict=True)
    ]
    gate_up = _results(tile_picks, products, len(values) * picks)
    hidden, hidden_scales = swiglu_quant.swiglu_quant(gate_up[None], None, scale_ue8m0=scale_ue8m0)
    return hidden[0], hidden_scales[0]


def _rejects_shapes(weight: Tensor, tile_picks: Tensor, **_: Any) -> str | None:
    del tile_picks
    return None if weight.is_contiguous() else "weights must be contiguous"


@HIDDEN_OP.backend("triton", needs=TRITON, rejects=_rejects_shapes)
def _hidden_triton(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    picks: int,
    scale_ue8m0: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import expert_tiles as own

    tiles = own.Tiles(tile_expert, tile_picks)
    weights = own.Weights(weight, weight_scale)
    return own.hidden(values, scales, weights, tiles, picks=picks, scale_ue8m0=scale_ue8m0, dtype=dtype)


def tile_hidden(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    picks: int,
    scale_ue8m0: bool,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    inputs = values, scales, weight, weight_scale, tile_expert, tile_picks
    return HIDDEN_OP.pick(backend)(*inputs, picks=picks, scale_ue8m0=scale_ue8m0, dtype=dtype)


def make_out_inputs(case: Case) -> dict[str, Any]:
    """Random rows, one a pick, and random weights."""
    g = torch.Generator().manual_seed(case.num_tokens)
    values, scales = fp8_gemm.random_activations(case.num_tokens * case.topk, case.hidden, g=g)
    weight, weight_scale = fp8_gemm.random_weight(case.num_experts, case.width, case.hidden, g=g)
    owners, rows = tiles_reference(_expert_ids(case), num_experts=case.num_experts)
    return {
        "values": values,
        "scales": scales.contiguous(),
        "weight": weight,
        "weight_scale": weight_scale,
        "tile_expert": owners,
        "tile_picks": rows,
        "dtype": case.dtype,
    }


def out_reference(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The contract, tile by tile."""
    out = torch.zeros(len(values), weight.shape[1], dtype=dtype)
    for expert, rows in zip(tile_expert.tolist(), tile_picks, strict=True):
        if expert >= 0:
            mine = rows[rows >= 0].long()
            out[mine] = fp8_gemm.reference(
                values[mine], scales[mine], weight[expert], weight_scale[expert], dtype=dtype
            )
    return out


OUT_OP = Op("tile_out", out_reference, CASES, make_out_inputs)


@OUT_OP.backend("torch")
def _out_torch(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    products = [
        fp8_gemm.fp8_gemm(values[rows], scales[rows], weight[e], weight_scale[e], dtype=dtype)
        for e, rows in zip(tile_expert.clamp(min=0).tolist(), tile_picks.clamp(min=0).long(), strict=True)
    ]
    return _results(tile_picks, products, len(values))


@OUT_OP.backend("triton", needs=TRITON, rejects=_rejects_shapes)
def _out_triton(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    from baleen_kernels.own import expert_tiles as own

    tiles = own.Tiles(tile_expert, tile_picks)
    return own.out(values, scales, own.Weights(weight, weight_scale), tiles, dtype=dtype)


def tile_out(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    tile_expert: Tensor,
    tile_picks: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    inputs = values, scales, weight, weight_scale, tile_expert, tile_picks
    return OUT_OP.pick(backend)(*inputs, dtype=dtype)
