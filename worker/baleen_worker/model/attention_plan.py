"""How one step's rows are grouped for attention. Built once a step and used by every layer.

Two equal forms of attention exist. The expanded form computes keys and values per head, which is cheapest for a
prompt that attends to itself; it looks at all keys, so it serves only rows whose whole context the indexer would select
anyway. The absorbed form works on the latents and takes any selection. Rows of one new token are batched.

Legend: T tokens of the step, B rows of a group, t tokens of each, n keys.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from baleen_worker.model.context import ForwardContext, ForwardRow, KvPools
    from baleen_worker.model.rope import RotaryTable

# Keys that a batch of one-token rows reads at a time, padding included.
_MAX_BATCHED_KEYS = 1 << 16


class AttentionForm(enum.Enum):
    """AUTO expands prompt pieces whose whole context is within the selection, and absorbs the rest."""

    AUTO = "auto"
    EXPANDED = "expanded"
    ABSORBED = "absorbed"


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Rows for the expanded form, end to end.

    tokens: [Te] int64, places in the flat batch. kv_slots: [N] int64, all keys of all rows.
    cu_q, cu_k: offsets of each row in the two.
    """

    tokens: Tensor
    kv_slots: Tensor
    cu_q: Sequence[int]
    cu_k: Sequence[int]


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """B rows of t tokens each for the absorbed form.

    tokens: [B * t] int64, places in the flat batch. kv_slots: [B, n] int64, padded with slots of the sink page.
    num_visible: [B * t] int64, keys that each token may see: those at positions up to its own.
    """

    tokens: Tensor
    kv_slots: Tensor
    num_visible: Tensor

    @property
    def tokens_per_row(self) -> int:
        """t."""
        return self.tokens.shape[0] // self.kv_slots.shape[0]

    @property
    def num_keys(self) -> int:
        """n."""
        return self.kv_slots.shape[1]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Every token of the step is in exactly one group."""

    expanded: ExpandedRows | None
    absorbed: Sequence[AbsorbedRows]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of every layer needs of the step.

    selections: by number of an absorbed group, the last selection that a layer made for it; layers that have no
    indexer of their own read it (IndexCache).
    """

    rotary: RotaryTable
    kv_slots: Tensor
    plan: AttentionPlan
    pools: KvPools
    selections: dict[int, Tensor] = field(default_factory=dict)


def plan_attention(context: ForwardContext, *, index_topk: int | None, form: AttentionForm) -> AttentionPlan:
    """Groups the rows. `index_topk` None: the model has no indexer and every token attends to all keys it can see.

    ValueError if the expanded form is forced on a row whose context exceeds `index_topk`.
    """
    expanded: list[ForwardRow] = []
    single: dict[int, list[ForwardRow]] = {}
    absorbed: list[AbsorbedRows] = []
    for row in context.rows:
        if _expands(row, index_topk, form):
            expanded.append(row)
        elif row.num_tokens == 1:
            # Rows of similar length share a batch, so that less than half of what is read is padding.
            single.setdefault(row.context_len.bit_length(), []).append(row)
        else:
            absorbed.append(_absorbed_rows([row], context))
    for rows in single.values():
        absorbed.extend(_absorbed_rows(batch, context) for batch in _batches(rows))
    return AttentionPlan(_expanded_rows(expanded, context) if expanded else None, absorbed)


def _expands(row: ForwardRow, index_topk: int | None, form: AttentionForm) -> bool:
    selects_all = index_topk is None or row.context_len <= index_topk
    if form is AttentionForm.EXPANDED and not selects_all:
        raise ValueError(
            f"the expanded form attends to every key, but only {index_topk} of {row.context_len} are to be selected"
        )
    return form is AttentionForm.EXPANDED or (form is AttentionForm.AUTO and selects_all and row.is_prefill)


def _batches(rows: list[ForwardRow]) -> Iterable[list[ForwardRow]]:
    size = max(1, _MAX_BATCHED_KEYS // max(row.context_len for row in rows))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _expanded_rows(rows: list[ForwardRow], context: ForwardContext) -> ExpandedRows:
    return ExpandedRows(
        tokens=torch.cat([_tokens(row, context) for row in rows]),
        kv_slots=torch.cat([_slots(row.page_table[None], row.context_len, context)[0] for row in rows]),
        cu_q=[0, *accumulate(row.num_tokens for row in rows)],
        cu_k=[0, *accumulate(row.context_len for row in rows)],
    )


def _absorbed_rows(rows: list[ForwardRow], context: ForwardContext) -> AbsorbedRows:
    tokens = torch.cat([_tokens(row, context) for row in rows])
    num_keys = max(row.context_len for row in rows)
    num_pages = -(-num_keys // context.page_size)
    # Padding names the sink page; what is read from it is never selected.
    page_tables = pad_sequence([row.page_table[:num_pages] for row in rows], batch_first=True, padding_value=0)
    return AbsorbedRows(tokens, _slots(page_tables, num_keys, context), context.positions[tokens] + 1)


def _tokens(row: ForwardRow, context: ForwardContext) -> Tensor:
    return torch.arange(row.start, row.start + row.num_tokens, device=context.positions.device)


def _slots(page_tables: Tensor, num_keys: int, context: ForwardContext) -> Tensor:
    """page_tables [B, P] -> slots [B, n] of positions 0 .. n - 1."""
    pages = page_tables[:, : -(-num_keys // context.page_size), None]
    offsets = torch.arange(context.page_size, device=page_tables.device)
    return (pages * context.page_size + offsets).flatten(1)[:, :num_keys]
