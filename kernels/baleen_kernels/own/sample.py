"""Triton: a token of each row at random. What `top_k` and `top_p` keep is found as the logit at which they end.

Logits become integers of the same order, and the boundary's 32 bits are found from the top, 11, 11 and 10 at a time:
parts of a row add their tokens' counts and masses to bins, then a program a row walks down the bins until it has as
many tokens as `top_k`, or as much mass as `top_p`, allows. `top_k` is settled first, since its tokens are the whole of
which `top_p` is a share; both begin with the same bins. Masses are integers, exp(score) * 2^45, whose sum does not
depend on the order of its terms. Rows that leave nothing out do nothing in any of these launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_MOST_PARTS = 32  # of a row
_BINS = tl.constexpr(2048)
# What a row knows: of top_k and of top_p, the boundary's upper bits, how many tokens lie above, and their mass; what
# top_p aims at; then the answer: the boundary, how many of its equals stay, and whether anything is left out.
_FACTS = tl.constexpr(9)
_AIM = tl.constexpr(6)
_BOUNDARY = tl.constexpr(7)
_STAY = tl.constexpr(8)
_ALL_STAY = tl.constexpr(1 << 40)


@triton.jit
def _ordered(x):
    """float32 -> int64 from 0 to 2^32 - 1 of the same order, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _cuts(top_k, top_p, temperature, row, vocab):
    """Whether top_k, and whether top_p, leaves anything out of the row."""
    random = tl.load(temperature + row) > 0
    k = tl.load(top_k + row)
    return random & (k > 0) & (k < vocab), random & (tl.load(top_p + row) < 1.0)


@triton.jit
def _scores(logits, greedy, temperature, row, row_stride, column, vocab):
    """The block's logits and scores; -inf beyond the row."""
    x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
    largest = tl.load(logits + row * row_stride + tl.load(greedy + row)).to(tl.float64)
    heat = tl.load(temperature + row)
    return x, (x.to(tl.float64) - largest) / tl.where(heat > 0, heat, 1.0)


@triton.jit
def _fill_bins(
    logits, greedy, temperature, top_k, top_p, facts, counts, masses, row_stride, vocab, chunk,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, FOR_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    by_k, by_p = _cuts(top_k, top_p, temperature, row, vocab)
    wanted = by_k | by_p
    if SHIFT + WIDTH < 32:
        wanted = by_p if FOR_P else by_k
    if wanted:
        first = tl.program_id(1) * chunk
        above = tl.load(facts + row * _FACTS + (3 if FOR_P else 0))
        for start in range(first, tl.minimum(first + chunk, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            x, score = _scores(logits, greedy, temperature, row, row_stride, column, vocab)
            key = _ordered(x)
            is_open = column < vocab
            if SHIFT + WIDTH < 32:
                is_open = is_open & (key >> (SHIFT + WIDTH) == above)
            place = row * _BINS + ((key >> SHIFT) & ((1 << WIDTH) - 1))
            mass = (tl.exp(score) * 35184372088832.0).to(tl.int64)
            tl.atomic_add(counts + place, 1, mask=is_open, sem="relaxed")
            tl.atomic_add(masses + place, mass, mask=is_open, sem="relaxed")


@triton.jit
def _walk_down(temperature, top_k, top_p, facts, counts, masses, vocab, ROUND: tl.constexpr, FOR_P: tl.constexpr):
    """One program a row. ROUND 0 to 2; the last ends the search."""
    row = tl.program_id(0).to(tl.int64)
    by_k, by_p = _cuts(top_k, top_p, temperature, row, vocab)
    mine = facts + row * _FACTS
    base = 3 if FOR_P else 0
    lane = tl.arange(0, _BINS)
    place = row * _BINS + _BINS - 1 - lane  # the largest first
    wanted = by_p if FOR_P else by_k
    if ROUND == 0 and FOR_P:
        # All of the row's mass, where top_k has not said what is left of it.
        if by_p & (by_k == 0):
            total = tl.sum(tl.load(masses + place), 0)
            tl.store(mine + _AIM, total)
        if by_p:
            whole = tl.load(mine + _AIM)
            aim = tl.ceil(tl.load(top_p + row) * whole.to(tl.float64)).to(tl.int64)
            tl.store(mine + _AIM, tl.minimum(tl.maximum(aim, 1), whole))
    if wanted:
        count, mass = tl.load(counts + place).to(tl.int64), tl.load(masses + place)
        upper, above, above_mass = tl.load(mine + base), tl.load(mine + base + 1), tl.load(mine + base + 2)
        if FOR_P:
            short = (above_mass + tl.cumsum(mass, 0)) < tl.load(mine + _AIM)
        else:
            short = (above + tl.cumsum(count, 0)) < tl.load(top_k + row)
        at = tl.minimum(tl.sum(short.to(tl.int32), 0), _BINS - 1)
        above += tl.sum(tl.where(lane < at, count, 0), 0)
        above_mass += tl.sum(tl.where(lane < at, mass, 0), 0)
        WIDTH: tl.constexpr = 11 if ROUND < 2 else 10
        upper = (upper << WIDTH) | (_BINS - 1 - at)
        if ROUND == 2:
            equals = tl.sum(tl.where(lane == at, count, 0), 0)
            one = tl.sum(tl.where(lane == at, mass, 0), 0) // tl.maximum(equals, 1)
            if FOR_P:
                missing = tl.load(mine + _AIM) - above_mass
                stay = (missing + one - 1) // tl.maximum(one, 1)
            else:
                stay = tl.load(top_k + row) - above
                tl.store(mine + _AIM, above_mass + stay * one)
            tl.store(mine + _BOUNDARY, upper)
            tl.store(mine + _STAY, tl.where(stay >= equals, _ALL_STAY, tl.maximum(stay, 1)))
        else:
            tl.store(mine + base, upper)
            tl.store(mine + base + 1, above)
            tl.store(mine + base + 2, above_mass)
        if ROUND > 0:  # those of the first round are read twice
            tl.store(counts + place, tl.zeros((_BINS,), tl.int32))
            tl.store(masses + place, tl.zeros((_BINS,), tl.int64))


@triton.jit
def _count_equals(
    logits, temperature, top_k, top_p, facts, equals, row_stride, vocab, chunk, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many tokens of each part lie on the boundary, where not all of them stay."""
    row = tl.program_id(0).to(tl.int64)
    by_k, by_p = _cuts(top_k, top_p, temperature, row, vocab)
    if (by_k | by_p) & (tl.load(facts + row * _FACTS + _STAY) < _ALL_STAY):
        boundary = tl.load(facts + row * _FACTS + _BOUNDARY)
        first = tl.program_id(1) * chunk
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(first, tl.minimum(first + chunk, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * row_stride + column, mask=column < vocab, other=float("-inf"))
            count += ((column < vocab) & (_ordered(x) == boundary)).to(tl.int32)
        tl.store(equals + row * PARTS + tl.program_id(1), tl.sum(count, 0))


@triton.jit
def _noise(key, column):
    """float64 noise of the block's tokens; `key` is the row's, as unsigned."""
    z = key + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    u = ((z >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(tl.minimum(u, 0.9999999999999999)))


@triton.jit
def _draw(
    logits, greedy, temperature, top_k, top_p, min_p, keys, facts, equals, best, places, row_stride, vocab, chunk,
    CUT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of each part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature + row) > 0:
        boundary, stay, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        cut = False
        if CUT:
            by_k, by_p = _cuts(top_k, top_p, temperature, row, vocab)
            cut = by_k | by_p
            if cut:
                boundary = tl.load(facts + row * _FACTS + _BOUNDARY)
                stay = tl.load(facts + row * _FACTS + _STAY)
                other = tl.arange(0, PARTS)
                counted_parts = tl.where(stay < _ALL_STAY, part, 0)
                counted = tl.load(equals + row * PARTS + other, mask=other < counted_parts, other=0)
                before = tl.sum(counted, 0).to(tl.int64)
        floor = tl.log(tl.minimum(tl.load(min_p + row), 1.0))
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        largest = tl.full((BLOCK,), float("-inf"), tl.float64)
        place = tl.full((BLOCK,), vocab - 1, tl.int32)
        first = part * chunk
        for start in range(first, tl.minimum(first + chunk, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            x, score = _scores(logits, greedy, temperature, row, row_stride, column, vocab)
            kept = (column < vocab) & (score >= floor)
            if cut:
                ordered = _ordered(x)
                equal = (column < vocab) & (ordered == boundary)
                rank = before + tl.cumsum(equal.to(tl.int64), 0) - 1
                kept = kept & ((ordered > boundary) | (equal & (rank < stay)))
                before += tl.sum(equal.to(tl.int64), 0)
            if tl.max(kept.to(tl.int32), 0) > 0:
                value = score + _noise(key, column)
                larger = kept & (value > largest)
                largest = tl.where(larger, value, largest)
                place = tl.where(larger, column, place)
        value = tl.max(largest, 0)
        tl.store(best + row * PARTS + part, value)
        tl.store(places + row * PARTS + part, tl.min(tl.where(largest == value, place, vocab - 1), 0))


@triton.jit
def _settle(greedy, temperature, best, places, token_ids, vocab, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy + row)
    if tl.load(temperature + row) > 0:
        part = row * PARTS + tl.arange(0, PARTS)
        value = tl.load(best + part)
        place = tl.where(value == tl.max(value, 0), tl.load(places + part), vocab - 1)
        token = tl.min(place, 0).to(tl.int64)
    tl.store(token_ids + row, token)


def choose(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    """Contract and shapes as in `baleen_kernels.sample`."""
    num_rows, vocab = logits.shape
    device = logits.device
    token_ids = torch.empty_like(greedy)
    if not num_rows:
        return token_ids
    parts = min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    chunk = triton.cdiv(triton.cdiv(vocab, parts), _BLOCK) * _BLOCK
    stride = logits.stride(0)
    facts = equals = None
    if top_k is not None and top_p is not None:
        facts, equals = _boundaries(logits, greedy, temperature, top_k, top_p, parts, chunk)
    best = torch.empty(num_rows, parts, dtype=torch.float64, device=device)
    places = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    _draw[(num_rows, parts)](
        logits, greedy, temperature, top_k, top_p, min_p, keys, facts, equals, best, places, stride, vocab, chunk,
        CUT=facts is not None, PARTS=parts, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _settle[(num_rows,)](greedy, temperature, best, places, token_ids, vocab, PARTS=parts, num_warps=1)
    return token_ids


def _boundaries(
    logits: Tensor, greedy: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, parts: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Where each row's tail begins, in `_FACTS` numbers a row, and how many equals each part has there."""
    (num_rows, vocab), device, stride = logits.shape, logits.device, logits.stride(0)
    facts = torch.zeros(num_rows, _FACTS.value, dtype=torch.int64, device=device)
    counts = torch.zeros(2, num_rows, _BINS.value, dtype=torch.int32, device=device)
    masses = torch.zeros(2, num_rows, _BINS.value, dtype=torch.int64, device=device)
    equals = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    rules = temperature, top_k, top_p, facts

    def fill(bins: int, shift: int, width: int, *, for_p: bool) -> None:
        _fill_bins[(num_rows, parts)](
            logits, greedy, *rules, counts[bins], masses[bins], stride, vocab, chunk,
            SHIFT=shift, WIDTH=width, FOR_P=for_p, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip

    def walk(bins: int, turn: int, *, for_p: bool) -> None:
        _walk_down[(num_rows,)](
            *rules, counts[bins], masses[bins], vocab, ROUND=turn, FOR_P=for_p, num_warps=8
        )  # fmt: skip

    fill(0, 21, 11, for_p=False)
    for for_p in (False, True):
        walk(0, 0, for_p=for_p)
        fill(1, 10, 11, for_p=for_p)
        walk(1, 1, for_p=for_p)
        fill(1, 0, 10, for_p=for_p)
        walk(1, 2, for_p=for_p)
    _count_equals[(num_rows, parts)](
        logits, *rules, equals, stride, vocab, chunk, PARTS=parts, BLOCK=_BLOCK, num_warps=8
    )  # fmt: skip
    return facts, equals
