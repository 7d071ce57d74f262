"""Index scores of FP8 queries and FP8 keys: `index_logits` as deployed, over gathered keys or over the pool's pages.

  score[t, s] = k_scale[s] * sum_j weights[t, j] * relu(q_values[t, j] . k_values[s])

weights hold the queries' scales and the constants, as `indexer_prep` makes them. Sums in float32.

ragged_scores: keys side by side. q_values [T, J, D], k_values [N, D] float8_e4m3fn, k_scales [N], weights [T, J]
float32; query t sees keys starts[t] .. ends[t] - 1, int32 -> [T, N] float32, of which the rest means nothing.
paged_scores: one query a request, keys in pages as in `index_key_pack`. q_values [B, J, D], weights [B, J], pages
[P, 64 * (D + 4)] uint8, lengths [B] int32, page_tables [B, W] int32 -> [B, max_length] float32, of which what lies
beyond each length means nothing. Lengths and tables stay on the device; `schedule` is what `paged_schedule` returned
for the lengths, or None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, index_key_pack, index_logits
from baleen_kernels.fp8_gemm import DEEP_GEMM
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Case:
    """`lengths`: keys that each query sees; of one request for ragged scores, of one each for paged ones."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int = 64


CASES = (
    Case("released", (300, 301, 302, 303)),
    Case("one_query", (70,)),
    Case("from_the_start", (1, 2, 3, 4, 5)),
    Case("mixed", (64, 1, 500, 129)),
    Case("half_the_heads", (200, 3), num_heads=32),
)


def _queries(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor]:
    q = torch.randn(len(case.lengths), case.num_heads, 128, generator=g)
    return fp8_quant.quantize_groups(q, scale_ue8m0=True)[0], torch.randn(q.shape[:2], generator=g)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random queries and keys of two requests; queries belong to the second."""
    g = torch.Generator().manual_seed(len(case.name))
    q_values, weights = _queries(case, g)
    before, most = 37, max(case.lengths)
    k_values, k_scales = fp8_quant.quantize_groups(torch.randn(before + most, 128, generator=g), scale_ue8m0=False)
    starts = torch.full((len(case.lengths),), before, dtype=torch.int32)
    return {
        "q_values": q_values,
        "weights": weights,
        "k_values": k_values,
        "k_scales": k_scales[:, 0].contiguous(),
        "starts": starts,
        "ends": starts + torch.tensor(case.lengths, dtype=torch.int32),
    }


def reference(
    q_values: Tensor, weights: Tensor, k_values: Tensor, k_scales: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """The contract through `index_logits`."""
    del starts, ends
    k = (k_values.float() * k_scales[:, None])[None]
    return index_logits.reference(q_values.float()[None], k, weights[None])[0]


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with zeros where the contract says nothing."""
    out, *rest = outputs
    place = torch.arange(out.shape[1], device=out.device)
    first = inputs["starts"][:, None] if "starts" in inputs else 0
    end = inputs["ends" if "ends" in inputs else "lengths"][:, None]
    return [out.masked_fill((place < first) | (place >= end), 0.0), *rest]


OP = Op("ragged_scores", reference, CASES, make_inputs, canonical=canonical, bf16_error=2e-3)


@OP.backend("torch")
def _torch(
    q_values: Tensor, weights: Tensor, k_values: Tensor, k_scales: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    del starts, ends
    k = fp8_quant.e4m3_to_float(k_values) * k_scales[:, None]
    return index_logits.index_logits(fp8_quant.e4m3_to_float(q_values)[None], k[None], weights[None])[0]


@OP.backend("deep_gemm", needs=DEEP_GEMM)
def _deep_gemm(
    q_values: Tensor, weights: Tensor, k_values: Tensor, k_scales: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    return deep_gemm.fp8_mqa_logits(q_values, (k_values, k_scales), weights, starts, ends, clean_logits=False)


def ragged_scores(
    q_values: Tensor,
    weights: Tensor,
    k_values: Tensor,
    k_scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(q_values, weights, k_values, k_scales, starts, ends)


def make_paged_inputs(case: Case) -> dict[str, Any]:
    """Random queries; pages in no order, their unused bytes old."""
    g = torch.Generator().manual_seed(len(case.name))
    q_values, weights = _queries(case, g)
    width = -(-max(case.lengths) // index_key_pack.PAGE_SIZE)
    num_pages = len(case.lengths) * width + 3
    pages = torch.zeros(num_pages, index_key_pack.index_page_bytes(128), dtype=torch.uint8)
    slots = torch.arange(num_pages * index_key_pack.PAGE_SIZE)
    index_key_pack.write_index_keys(pages, slots, torch.randn(slots.numel(), 128, generator=g), scale_ue8m0=True)
    tables = torch.randperm(num_pages, generator=g)[: len(case.lengths) * width].view(-1, width).int()
    return {
        "q_values": q_values,
        "weights": weights,
        "pages": pages,
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "page_tables": tables,
        "schedule": None,
        "max_length": width * index_key_pack.PAGE_SIZE,
    }


def paged_reference(
    q_values: Tensor,
    weights: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    schedule: Tensor | None,
    *,
    max_length: int,
) -> Tensor:
    """The contract, request by request."""
    del lengths, schedule
    out = torch.zeros(q_values.shape[0], max_length)
    for row in range(q_values.shape[0]):
        slots = (page_tables[row].long()[:, None] * index_key_pack.PAGE_SIZE + torch.arange(64)).flatten()[:max_length]
        k = index_key_pack.read_index_keys(pages, slots, dtype=torch.float32)
        out[row] = index_logits.reference(q_values[row].float()[None, None], k[None], weights[row][None, None])[0, 0]
    return out


PAGED_OP = Op("paged_scores", paged_reference, CASES, make_paged_inputs, canonical=canonical, bf16_error=2e-3)


@PAGED_OP.backend("torch")
def _paged_torch(
    q_values: Tensor,
    weights: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    schedule: Tensor | None,
    *,
    max_length: int,
) -> Tensor:
    del lengths, schedule
    offsets = torch.arange(index_key_pack.PAGE_SIZE, device=pages.device)
    slots = (page_tables.long()[..., None] * index_key_pack.PAGE_SIZE + offsets).flatten(1)[:, :max_length]
    k = index_key_pack.read_index_keys(pages, slots.flatten(), dtype=torch.float32).unflatten(0, slots.shape)
    return index_logits.index_logits(fp8_quant.e4m3_to_float(q_values)[:, None], k, weights[:, None])[:, 0]


@PAGED_OP.backend("deep_gemm", needs=DEEP_GEMM)
def _paged_deep_gemm(
    q_values: Tensor,
    weights: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    schedule: Tensor | None,
    *,
    max_length: int,
) -> Tensor:
    import deep_gemm  # pyright: ignore[reportMissingImports]

    lengths = lengths[:, None]
    if schedule is None:
        schedule = paged_schedule(lengths[:, 0])
    cache = pages.view(pages.shape[0], index_key_pack.PAGE_SIZE, 1, -1)
    # One query a request: [B, 1, J, D] and lengths [B, 1].
    return deep_gemm.fp8_paged_mqa_logits(
        q_values[:, None], cache, weights, lengths, page_tables, schedule, max_length, clean_logits=False
    )


def paged_schedule(lengths: Tensor) -> Tensor:
    """How the deep_gemm backend spreads the work; made once a step, for all layers."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    return deep_gemm.get_paged_mqa_logits_metadata(lengths[:, None], index_key_pack.PAGE_SIZE, deep_gemm.get_num_sms())


def paged_scores(
    q_values: Tensor,
    weights: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    schedule: Tensor | None = None,
    *,
    max_length: int,
    backend: str = "torch",
) -> Tensor:
    """See the module docstring."""
    return PAGED_OP.pick(backend)(q_values, weights, pages, lengths, page_tables, schedule, max_length=max_length)
