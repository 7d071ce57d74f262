"""A number that tells whether the bytes of a page are what they were, computed where the page is.

memory [B] uint8; stores [S, 2] int64: where in it each store's first page begins, and the bytes of its pages, both
multiples of 16; pages [N] int64 -> [N] int64. A page is its bytes in all stores, one store after the other, read as
words of 8 bytes w_0, w_1, …, lowest byte first. Its digest is the sum modulo 2^64 of m(w_i + (i + 1) * GOLDEN), m being
SplitMix64's one-to-one mixing. So a change of one word always changes it; of any other change, one in 2^64 does not.
It is no proof against who wants to deceive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1
WORD_BYTES = 8
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`page_bytes` of each store; all have `num_pages`."""

    name: str
    page_bytes: tuple[int, ...]
    num_pages: int
    pages: tuple[int, ...]


CASES = (
    Case("two_stores", (80, 48), 5, (1, 4, 2)),
    Case("larger_than_a_block", (16_656,), 2, (1, 0)),
    Case("a_page_twice", (16, 16, 32), 3, (2, 2)),
    Case("nothing", (16,), 2, ()),
)


def make_stores(page_bytes: tuple[int, ...], num_pages: int) -> Tensor:
    """Stores one after the other, a gap after each."""
    starts = [sum(num_pages * size + ALIGNMENT for size in page_bytes[:at]) for at in range(len(page_bytes))]
    return torch.tensor([*zip(starts, page_bytes, strict=True)], dtype=torch.int64)


def make_memory(page_bytes: tuple[int, ...], num_pages: int, *, seed: int) -> Tensor:
    """Random bytes for such stores."""
    num_bytes = sum(num_pages * size + ALIGNMENT for size in page_bytes)
    return torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random pages."""
    return {
        "memory": make_memory(case.page_bytes, case.num_pages, seed=0),
        "stores": make_stores(case.page_bytes, case.num_pages),
        "pages": torch.tensor(case.pages, dtype=torch.int64),
    }


def page_bytes_of(memory: Tensor, stores: Tensor, page: int) -> Tensor:
    """A page's bytes in all stores."""
    return torch.cat([memory[start + page * size :][:size] for start, size in stores.tolist()])


def reference(memory: Tensor, stores: Tensor, pages: Tensor) -> Tensor:
    """The contract, word by word."""
    digests: list[int] = []
    for page in pages.tolist():
        data = bytes(page_bytes_of(memory, stores, page).tolist())
        total = 0
        for place in range(len(data) // WORD_BYTES):
            word = int.from_bytes(data[WORD_BYTES * place :][:WORD_BYTES], "little")
            z = (word + (place + 1) * GOLDEN) & _ALL
            z = (z ^ (z >> 30)) * _FACTORS[0] & _ALL
            z = (z ^ (z >> 27)) * _FACTORS[1] & _ALL
            total += z ^ (z >> 31)
        digests.append(_signed(total & _ALL))
    return torch.tensor(digests, dtype=torch.int64)


OP = Op("page_digest", reference, CASES, make_inputs, atol=0, rtol=0)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, count: int) -> Tensor:
    """Without the sign, which PyTorch's shift brings along."""
    return (z >> count) & ((1 << (64 - count)) - 1)


@OP.backend("torch")
def _torch(memory: Tensor, stores: Tensor, pages: Tensor) -> Tensor:
    out = torch.zeros(len(pages), dtype=torch.int64, device=pages.device)
    first = 0
    for start, size in stores.tolist():
        num_pages = int(pages.max()) + 1 if len(pages) else 0
        words = memory[start : start + num_pages * size].view(torch.int64).view(num_pages, size // WORD_BYTES)[pages]
        place = torch.arange(first + 1, first + 1 + words.shape[1], device=pages.device)
        z = words + place * _signed(GOLDEN)
        z = (z ^ _shifted(z, 30)) * _signed(_FACTORS[0])
        z = (z ^ _shifted(z, 27)) * _signed(_FACTORS[1])
        out += (z ^ _shifted(z, 31)).sum(1)
        first += words.shape[1]
    return out


def _rejects_triton(memory: Tensor, stores: Tensor, pages: Tensor) -> str | None:
    del memory, pages
    return "stores and pages must be multiples of 16 bytes" if bool((stores % ALIGNMENT).any()) else None


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(memory: Tensor, stores: Tensor, pages: Tensor) -> Tensor:
    from baleen_kernels.own import pages as own

    starts, sizes = stores.unbind(1)
    words = sizes // WORD_BYTES
    out = torch.zeros_like(pages)
    own.digest(count_of(pages), memory.data_ptr() + starts, pages, words, words.cumsum(0) - words, out)
    return out


def page_digest(memory: Tensor, stores: Tensor, pages: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(memory, stores, pages)


def count_of(pages: Tensor) -> Tensor:
    """Their number, on their device."""
    return torch.tensor([len(pages)], dtype=torch.int64, device=pages.device)
