"""Triton: -inf where a row's mask has no bit. Programs take parts of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _forbid(logits, rows, masks, row_stride, vocab, num_words, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + place * num_words + token // 32, mask=token < vocab, other=-1)
    forbidden = (token < vocab) & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * row_stride + token, float("-inf"), mask=forbidden)


def forbid(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Contract and shapes as in `baleen_kernels.mask_logits`."""
    if rows.numel():
        vocab = logits.shape[1]
        grid = (rows.numel(), triton.cdiv(vocab, _BLOCK))
        _forbid[grid](logits, rows, masks, logits.stride(0), vocab, masks.shape[1], BLOCK=_BLOCK, num_warps=8)
