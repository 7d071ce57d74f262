"""The expanded form of attention over many keys: all at once where they fit, else part by part.

Keys and values of 128 heads take some forty times the room of the latents they come from, so a long cached prefix is
expanded a part at a time, and what the parts give is merged by the logarithms of their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from baleen_kernels.mha_partial import merge_partials

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.model.attention_plan import ExpandedRows

# Numbers of expanded keys and values that are held at a time (1 GiB of bfloat16).
MAX_EXPANDED_NUMBERS = 1 << 29

Expand = Callable[["Tensor"], "tuple[Tensor, Tensor]"]


def attend_expanded(
    q: Tensor,
    rows: ExpandedRows,
    expand: Expand,
    *,
    softmax_scale: float,
    whole: Callable[..., Any],
    partial: Callable[..., Any],
    max_numbers: int | None = None,
) -> Tensor:
    """q [Te, H, D] -> [Te, H, V]. `expand`: slots [n] -> keys [n, H, D] and values [n, H, V].

    `whole` and `partial` are `mha_dense` and `mha_partial`.
    """
    most = (MAX_EXPANDED_NUMBERS if max_numbers is None else max_numbers) // (2 * q.shape[1] * q.shape[2])
    most = max(most, 1)
    if rows.cu_k[-1] <= most:
        return whole(q, *expand(rows.kv_slots), rows.cu_q, rows.cu_k, softmax_scale=softmax_scale)
    parts = [
        _attend_row(q[q_start:q_end], rows.kv_slots[k_start:k_end], expand, softmax_scale, partial, most)
        for (q_start, q_end), (k_start, k_end) in zip(pairwise(rows.cu_q), pairwise(rows.cu_k), strict=True)
    ]
    return torch.cat(parts)


def _attend_row(
    q: Tensor, kv_slots: Tensor, expand: Expand, softmax_scale: float, partial: Callable[..., Any], most: int
) -> Tensor:
    """One row: its own tokens causally, then what lies before them, `most` keys at a time."""
    num_tokens, num_keys = q.shape[0], kv_slots.shape[0]
    first_own = num_keys - num_tokens
    out, lse = partial(
        q, *expand(kv_slots[first_own:]), [0, num_tokens], [0, num_tokens], softmax_scale=softmax_scale, causal=True
    )
    for start in range(0, first_own, most):
        end = min(start + most, first_own)
        other = partial(
            q,
            *expand(kv_slots[start:end]),
            [0, num_tokens],
            [0, end - start],
            softmax_scale=softmax_scale,
            causal=False,
        )
        out, lse = merge_partials(out, lse, *other)
    return out
