"""Triton: pages of many stores at once, copied and digested where they are, which may be another device's memory.

Stores are given by addresses and not by tensors: memory of another process has no tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of a copy: enough bytes in flight for a link between devices, and most of the device left to its steps.
COPY_PROGRAMS = 128
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
def _digest(addresses, words, firsts, pages, out, BLOCK: tl.constexpr):
    place, store = tl.program_id(0), tl.program_id(1)
    num_words, first = tl.load(words + store), tl.load(firsts + store)
    source = _page_at(out, tl.load(addresses + store), tl.load(pages + place), num_words)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_words, BLOCK):
        at = tl.multiple_of(start, 2) + tl.arange(0, BLOCK)
        word = tl.load(source + at, mask=at < tl.multiple_of(num_words, 2), other=0)
        total += tl.where(at < num_words, _mixed(word, first + at), 0)
    tl.atomic_add(out + place, tl.sum(total, 0))


@triton.jit
def _copy(
    anchor,
    sources,
    source_pages,
    targets,
    target_pages,
    words,
    num_tasks,
    num_stores,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for task in range(tl.program_id(0), num_tasks, PROGRAMS):
        place, store = task // num_stores, task % num_stores
        num_words = tl.load(words + store)
        source = _page_at(anchor, tl.load(sources + store), tl.load(source_pages + place), num_words)
        target = _page_at(anchor, tl.load(targets + store), tl.load(target_pages + place), num_words)
        for start in range(0, num_words, BLOCK):
            at = tl.multiple_of(start, 2) + tl.arange(0, BLOCK)
            # Past the first cache: another process may have written these since the last copy.
            word = tl.load(source + at, mask=at < tl.multiple_of(num_words, 2), cache_modifier=".cg")
            tl.store(target + at, word, mask=at < tl.multiple_of(num_words, 2))


def digest(addresses: Tensor, words: Tensor, pages: Tensor) -> Tensor:
    """Contract as in `baleen_kernels.page_digest`; stores by the addresses of their first pages, sizes in words."""
    out = torch.zeros(len(pages), dtype=torch.int64, device=pages.device)
    firsts = words.cumsum(0) - words
    if len(pages):
        grid = (len(pages), len(addresses))
        _digest[grid](addresses, words, firsts, pages, out, BLOCK=_BLOCK_WORDS, num_warps=_WARPS)
    return out


def copy(sources: Tensor, source_pages: Tensor, targets: Tensor, target_pages: Tensor, words: Tensor) -> None:
    """Contract as in `baleen_kernels.page_copy`; stores by the addresses of their first pages, sizes in words."""
    num_tasks = len(source_pages) * len(sources)
    programs = COPY_PROGRAMS
    if num_tasks:
        _copy[(min(programs, num_tasks),)](
            torch.empty(2, dtype=torch.int64, device=words.device),
            sources,
            source_pages,
            targets,
            target_pages,
            words,
            num_tasks,
            len(sources),
            PROGRAMS=min(programs, num_tasks),
            BLOCK=_BLOCK_WORDS,
            num_warps=_WARPS,
        )
