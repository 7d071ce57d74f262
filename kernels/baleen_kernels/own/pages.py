"""Triton: pages of many stores at once, copied and digested where they are, which may be another device's memory.

How many pages there are is read on the device, so that a launch can be part of a graph. Stores are given by addresses
and not by tensors: memory of another process has no tensor. A task is a page in one store; a launch does one part of
all tasks, so that one part can be digested while the next is copied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Programs of a copy: enough bytes in flight for a link between devices, and most of the device left to its steps.
COPY_PROGRAMS = 128
# Of a digest, which reads the device's own memory: three a multiprocessor of an H200. A fourth would take the registers
# that are left there, and the copy of the next part would wait for the digest of this one.
DIGEST_PROGRAMS = 396
_BLOCK_WORDS = 2048
_WARPS = 8


@triton.jit
def _page_at(anchor, address, page, num_words):
    """The words of a page of the store at an address, like the anchor a multiple of 16 bytes.

    Counted from a pointer, since of a bare address the compiler believes no alignment, and loads word by word.
    """
    return anchor + tl.multiple_of((address - anchor.to(tl.int64, bitcast=True)) // 8 + page * num_words, 2)


@triton.jit
def _mixed(word, place):
    """A one-to-one map of words for each place: SplitMix64's."""
    z = word.to(tl.uint64, bitcast=True) + (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _tasks_before(part, count, num_stores, parts):
    """Tasks of all earlier parts."""
    return tl.load(count) * num_stores * part // parts


@triton.jit(do_not_specialize=["part"])
def _digest(
    count,
    addresses,
    pages,
    words,
    firsts,
    out,
    num_stores,
    part,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = _tasks_before(part, count, num_stores, PARTS)
    for task in range(begin + tl.program_id(0), _tasks_before(part + 1, count, num_stores, PARTS), PROGRAMS):
        place, store = task // num_stores, task % num_stores
        num_words, first = tl.load(words + store), tl.load(firsts + store)
        source = _page_at(out, tl.load(addresses + store), tl.load(pages + place), num_words)
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, num_words, BLOCK):
            at = tl.multiple_of(start, 2) + tl.arange(0, BLOCK)
            word = tl.load(source + at, mask=at < tl.multiple_of(num_words, 2), other=0)
            total += tl.where(at < num_words, _mixed(word, first + at), 0)
        tl.atomic_add(out + place, tl.sum(total, 0))


@triton.jit(do_not_specialize=["part"])
def _copy(
    count,
    sources,
    source_pages,
    targets,
    target_pages,
    words,
    num_stores,
    part,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = _tasks_before(part, count, num_stores, PARTS)
    for task in range(begin + tl.program_id(0), _tasks_before(part + 1, count, num_stores, PARTS), PROGRAMS):
        place, store = task // num_stores, task % num_stores
        num_words = tl.load(words + store)
        source = _page_at(words, tl.load(sources + store), tl.load(source_pages + place), num_words)
        target = _page_at(words, tl.load(targets + store), tl.load(target_pages + place), num_words)
        for start in range(0, num_words, BLOCK):
            at = tl.multiple_of(start, 2) + tl.arange(0, BLOCK)
            # Past the first cache: another process may have written these since the last copy.
            word = tl.load(source + at, mask=at < tl.multiple_of(num_words, 2), cache_modifier=".cg")
            tl.store(target + at, word, mask=at < tl.multiple_of(num_words, 2))


def digest(
    count: Tensor,
    addresses: Tensor,
    pages: Tensor,
    words: Tensor,
    firsts: Tensor,
    out: Tensor,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Adds digests of the first `count` [1] pages, as in `baleen_kernels.page_digest`, to `out`, or a part of each.

    Stores by the addresses of their first pages and the words of a page; `firsts`: words of a page before each store's.
    """
    _digest[(DIGEST_PROGRAMS,)](
        count,
        addresses,
        pages,
        words,
        firsts,
        out,
        len(words),
        part,
        PARTS=parts,
        PROGRAMS=DIGEST_PROGRAMS,
        BLOCK=_BLOCK_WORDS,
        num_warps=_WARPS,
    )


def copy(
    count: Tensor,
    sources: Tensor,
    source_pages: Tensor,
    targets: Tensor,
    target_pages: Tensor,
    words: Tensor,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Copies a part of the first `count` [1] pages, as in `baleen_kernels.page_copy`; stores as in `digest`."""
    _copy[(COPY_PROGRAMS,)](
        count,
        sources,
        source_pages,
        targets,
        target_pages,
        words,
        len(words),
        part,
        PARTS=parts,
        PROGRAMS=COPY_PROGRAMS,
        BLOCK=_BLOCK_WORDS,
        num_warps=_WARPS,
    )
