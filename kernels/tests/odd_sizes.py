"""Random sizes beyond the cases that op files declare: odd, tiny, at and around what kernels cut their work into.

`draw` makes the inputs of one call; the same seed gives the same call. Sizes are such that references, which go row by
row, take milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from baleen_kernels import (
    combine_norm,
    compact_slots,
    decode_inputs,
    decode_results,
    expert_tiles,
    greedy_choice,
    index_scores,
    indexer_prep,
    mask_logits,
    merge_parts,
    mla_pages,
    mla_prep,
    mla_query,
    mla_slots,
    moe_choose,
    moe_permute,
    moe_route,
    norm_quant,
    page_copy,
    page_digest,
    sample,
    swiglu_quant,
    topk_slots,
    value_quant,
)

Draw = Callable[[random.Random], Mapping[str, Any]]


def _tokens(g: random.Random, most: int = 300) -> int:
    """Few, or around a power of two, or any."""
    around = 2 ** g.randrange(0, most.bit_length()) + g.choice([-1, 0, 1])
    return max(min(g.choice([g.randrange(1, 6), around, g.randrange(1, most)]), most), 1)


def _topk(g: random.Random) -> Mapping[str, Any]:
    longest = g.choice([70, 700, 5_000, 14_000, 70_000])
    lengths = tuple(g.choice([0, 1, g.randrange(longest), longest]) for _ in range(g.randrange(1, 7)))
    values = g.choice(["normal", "normal", "plateau", "signed_zeros", "not_finite"])
    levels = g.choice([0, 0, 0, 1, 2, 5]) if values == "normal" else 0
    ragged, paged = g.random() < 0.4, g.random() < 0.7
    topk = g.choice([1, 7, 64, 100, 513, 2047, 2048])
    return topk_slots.make_inputs(topk_slots.Case("odd", lengths, topk, levels, values, ragged, paged))


def _page_sizes(g: random.Random) -> tuple[int, ...]:
    """Of a page in up to four stores; the largest is more than a block of words."""
    return tuple(16 * g.choice([1, 2, 33, 1023, 1025]) for _ in range(g.randrange(1, 5)))


def _page_digest(g: random.Random) -> Mapping[str, Any]:
    num_pages = g.randrange(1, 7)
    pages = tuple(g.randrange(num_pages) for _ in range(g.randrange(1, 5)))
    return page_digest.make_inputs(page_digest.Case("odd", _page_sizes(g), num_pages, pages))


def _page_copy(g: random.Random) -> Mapping[str, Any]:
    num_pages = g.randrange(1, 7)
    written = tuple(g.sample(range(num_pages + 2), g.randrange(1, num_pages + 3)))
    read = tuple(g.randrange(num_pages) for _ in written)
    return page_copy.make_inputs(page_copy.Case("odd", _page_sizes(g), num_pages, read, written))


def _attend(g: random.Random) -> Mapping[str, Any]:
    """Half of the pools packed; most selections as wide as libraries want them."""
    tokens, heads = g.choice([1, 3, 17, 127]), g.choice([1, 3, 7, 16, 17, 64, 127, 128])
    if tokens > 17:
        heads = min(heads, 17)  # the reference is slow
    topk = g.choice([64, 100, 128, 256, 384, 1024, 2048])
    padding = g.choice(["some", "some", "none", "tail", "all"])
    poison = padding == "some" and g.random() < 0.5
    case = mla_slots.Case("odd", tokens, heads, topk, g.random() < 0.5, padding, poison=poison)
    return mla_slots.make_inputs(case)


def _attend_pages(g: random.Random) -> Mapping[str, Any]:
    """Half of the pools packed; rows that end before, at and behind the end of a page."""
    lengths = tuple(
        g.choice([0, 1, 63, 64, 65, g.randrange(1, 900), g.choice([1, 3000])]) for _ in range(g.randrange(1, 9))
    )
    heads = g.choice([1, 3, 7, 16, 17, 64, 127, 128])
    return mla_pages.make_inputs(mla_pages.Case("odd", lengths, heads, g.random() < 0.5, g.randrange(40)))


def _close_gaps(g: random.Random) -> Mapping[str, Any]:
    case = compact_slots.Case("odd", g.randrange(1, 40), g.randrange(1, 2100), g.choice([0.0, 0.3, 0.99, 1.0]))
    return compact_slots.make_inputs(case)


def _route(g: random.Random) -> Mapping[str, Any]:
    groups = 2 ** g.randrange(0, 4)
    experts = groups * 2 ** g.randrange(1, 6)
    kept = g.randrange(1, groups + 1)
    topk = g.randrange(1, min(8, kept * experts // groups) + 1)
    case = moe_route.Case(
        "odd", _tokens(g), experts, groups, kept, topk, g.random() < 0.8, g.choice([0.0, -0.8]), g.choice([0, 0, 2])
    )
    return moe_route.make_inputs(case)


def _moe(g: random.Random, width: int = 128, most: int = 300) -> moe_permute.Case:
    experts = 2 ** g.randrange(1, 9)
    return moe_permute.Case("odd", _tokens(g, most), experts, g.randrange(1, min(8, experts) + 1), width=width)


def _tiles(g: random.Random, most: int = 200) -> expert_tiles.Case:
    experts = 2 ** g.randrange(1, 9)
    return expert_tiles.Case("odd", _tokens(g, most), experts, g.randrange(1, min(8, experts) + 1))


def _products(g: random.Random) -> expert_tiles.Case:
    experts = 2 ** g.randrange(1, 5)
    topk = g.randrange(1, min(8, experts) + 1)
    return expert_tiles.Case("odd", _tokens(g, 60), experts, topk, width=128 * g.randrange(1, 5), hidden=128)


def _mla_prep(g: random.Random) -> Mapping[str, Any]:
    return mla_prep.make_inputs(mla_prep.Case("odd", _tokens(g, 200), packed=g.random() < 0.5))


def _indexer_prep(g: random.Random) -> Mapping[str, Any]:
    case = indexer_prep.Case("odd", _tokens(g, 80), g.choice([0, 16, 32, 64]), scale_ue8m0=g.random() < 0.7)
    return indexer_prep.make_inputs(case)


def _greedy(g: random.Random) -> Mapping[str, Any]:
    vocab = g.choice([1, 2, 33, 4095, 4097, g.randrange(1, 150_000)])
    odd = g.choice([None, None, float("nan"), float("inf")])
    return greedy_choice.make_inputs(greedy_choice.Case("odd", _tokens(g, 20), vocab, g.choice([0, 2]), odd))


def _decode_inputs(g: random.Random) -> Mapping[str, Any]:
    case = decode_inputs.Case("odd", _tokens(g), g.randrange(1, 400), g.choice([1, 3, 1023, 1025, 2049]))
    return decode_inputs.make_inputs(case)


def _norm(g: random.Random) -> Mapping[str, Any]:
    return norm_quant.make_inputs(
        norm_quant.Case("odd", _tokens(g, 12), 128 * g.randrange(1, 57), has_delta=g.random() < 0.5)
    )


def _values(g: random.Random) -> Mapping[str, Any]:
    case = value_quant.Case("odd", g.randrange(1, value_quant.MOST_TOKENS + 1), g.randrange(1, 129))
    return value_quant.make_inputs(case)


def _combine_norm(g: random.Random) -> Mapping[str, Any]:
    width, picks = 128 * g.randrange(1, 57), g.randrange(1, 10)
    case = combine_norm.Case("odd", _tokens(g, 12), width, picks, has_shared=g.random() < 0.5)
    return combine_norm.make_inputs(case)


def _results(g: random.Random) -> Mapping[str, Any]:
    num_rows = _tokens(g, 64)
    case = decode_results.Case(
        "odd", num_rows, num_rows + g.randrange(9), num_rows + g.randrange(9), g.randrange(2**40)
    )
    return decode_results.make_inputs(case)


def _choose(g: random.Random) -> Mapping[str, Any]:
    return moe_choose.make_inputs(moe_choose.Case("odd", g.randrange(1, moe_choose.MOST_TOKENS + 1)))


def _swiglu(g: random.Random) -> Mapping[str, Any]:
    boxes, rows = g.randrange(1, 6), _tokens(g, 60)
    width = 256 * g.randrange(1, 9)
    if g.random() < 0.3:
        owned = tuple(g.random() < 0.7 for _ in range(rows))
        return swiglu_quant.make_inputs(swiglu_quant.Case("odd", None, (1, rows, width), owned))
    counts = tuple(g.randrange(rows + 1) for _ in range(boxes)) if g.random() < 0.7 else None
    return swiglu_quant.make_inputs(swiglu_quant.Case("odd", counts, (boxes, rows, width)))


def _sample(g: random.Random) -> Mapping[str, Any]:
    vocab = g.choice([1, 31, 2047, 2049, 5000, g.randrange(1, 70_000)])

    def several(*values: Any) -> tuple[Any, ...]:
        return tuple(g.choice(values) for _ in range(g.randrange(1, 4)))

    ends = (
        (several(0, 1, 2, 50, vocab // 2, vocab), several(1.0, 0.95, 0.5, 1e-3)) if g.random() < 0.8 else (None, None)
    )
    case = sample.Case(
        "odd",
        _tokens(g, 6),
        vocab,
        several(1.0, 0.7, 0.0, 1.9, 0.05),
        *ends,
        several(0.0, 0.0, 0.02, 1.0),
        levels=g.choice([0, 0, 0, 2, 40]),
        allowed=g.choice([None, None, 1, 5, max(vocab // 3, 1)]),
    )
    return sample.make_inputs(case)


def _masks(g: random.Random) -> Mapping[str, Any]:
    rows = _tokens(g, 20)
    masked = tuple(g.sample(range(rows), g.randrange(rows + 1)))
    return mask_logits.make_inputs(mask_logits.Case("odd", rows, g.randrange(1, 20_000), masked))


def _queries(g: random.Random) -> mla_query.Case:
    return mla_query.Case("odd", _tokens(g), g.choice([1, 3, 8, 16, 100, 128]))


def _merge(g: random.Random) -> Mapping[str, Any]:
    parts = 2 ** g.randrange(0, 4)
    case = merge_parts.Case("odd", _tokens(g, 40), parts, g.choice([1, 3, 64, 128]), empty=g.randrange(parts + 1))
    return merge_parts.make_inputs(case)


def _scores(g: random.Random) -> index_scores.Case:
    lengths = tuple(g.choice([1, 63, 64, 65, g.randrange(1, 3000)]) for _ in range(g.randrange(1, 40)))
    return index_scores.Case("odd", lengths, g.choice([32, 64]))


DRAWS: dict[str, Draw] = {
    "absorb_queries": lambda g: mla_query.make_absorb_inputs(_queries(g)),
    "combine_norm": _combine_norm,
    "compact_slots": _close_gaps,
    "decode_inputs": _decode_inputs,
    "decode_results": _results,
    "greedy_choice": _greedy,
    "indexer_prep": _indexer_prep,
    "mask_logits": _masks,
    "merge_parts": _merge,
    "mla_pages": _attend_pages,
    "mla_prep": _mla_prep,
    "mla_slots": _attend,
    "moe_boxes": lambda g: moe_permute.make_box_inputs(_moe(g)),
    "moe_choose": _choose,
    "moe_combine": lambda g: moe_permute.make_combine_inputs(_moe(g, 128 * g.randrange(1, 20), most=100)),
    "moe_route": _route,
    "moe_scatter": lambda g: moe_permute.make_scatter_inputs(_moe(g, 128 * g.randrange(1, 20), most=100)),
    "moe_segments": lambda g: moe_permute.make_segment_inputs(_moe(g)),
    "moe_tiles": lambda g: expert_tiles.make_tile_inputs(_tiles(g)),
    "norm_quant": _norm,
    "page_copy": _page_copy,
    "page_digest": _page_digest,
    "paged_scores": lambda g: index_scores.make_paged_inputs(_scores(g)),
    "ragged_scores": lambda g: index_scores.make_inputs(_scores(g)),
    "rotate_queries": lambda g: mla_query.make_rotate_inputs(_queries(g)),
    "sample": _sample,
    "swiglu_quant": _swiglu,
    "tile_hidden": lambda g: expert_tiles.make_hidden_inputs(_products(g)),
    "tile_out": lambda g: expert_tiles.make_out_inputs(_products(g)),
    "topk_slots": _topk,
    "value_quant": _values,
}


def draw(op: str, seed: int) -> Mapping[str, Any]:
    """Inputs of one call of the op."""
    torch.manual_seed(seed)
    return DRAWS[op](random.Random(f"{op} {seed}"))
