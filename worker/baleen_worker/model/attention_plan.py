"""How one step's rows are grouped for attention. Built once a step and used by every layer.

Two equal forms of attention exist. The expanded form computes keys and values per head, which is cheapest for a
prompt that attends to itself; it looks at all keys, so it serves only rows whose whole context the indexer would select
anyway. The absorbed form works on the latents and takes any selection. Rows of one new token are batched.

A piece of a prompt that crosses the selection's width is parted: its tokens that see no more keys than are selected may
attend in the expanded form, the others may not. After a cached prefix the expanded form has to compute keys that
nobody asked for yet, so there it is taken where that costs less (`expanding_pays`).

Legend: T tokens of the step, B rows of a group, t tokens of each, n keys.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from baleen_worker.model.context import ForwardRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from baleen_worker.model.context import ForwardContext, KvPools
    from baleen_worker.model.rope import RotaryTable
    from baleen_worker.model_config import ModelConfig

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


def plan_attention(context: ForwardContext, *, config: ModelConfig, form: AttentionForm) -> AttentionPlan:
    """Groups the rows. A model without an indexer attends to all keys that a token can see.

    ValueError if the expanded form is forced on a row whose context exceeds what the indexer selects.
    """
    expanded: list[ForwardRow] = []
    single: dict[int, list[ForwardRow]] = {}
    absorbed: list[AbsorbedRows] = []
    for whole in context.rows:
        num_expanded = _num_expanded(whole, config, form)
        if num_expanded:
            expanded.append(_part(whole, 0, num_expanded))
        if num_expanded == whole.num_tokens:
            continue
        row = _part(whole, num_expanded, whole.num_tokens)
        if row.num_tokens == 1:
            # Rows of similar length share a batch, so that less than half of what is read is padding.
            single.setdefault(row.context_len.bit_length(), []).append(row)
        else:
            absorbed.append(_absorbed_rows([row], context))
    for rows in single.values():
        absorbed.extend(_absorbed_rows(batch, context) for batch in _batches(rows))
    return AttentionPlan(_expanded_rows(expanded, context) if expanded else None, absorbed)


def expanding_pays(config: ModelConfig, num_tokens: int, num_keys: int, *, absorbed_keys: int | None = None) -> bool:
    """Whether the expanded form takes fewer multiplications than the absorbed one, for the last tokens of a row.

    The expanded form computes every key and value per head once and then multiplies narrow heads; the absorbed form
    computes nothing beforehand and multiplies wide latents. So it is a question of how many tokens share the keys.
    `absorbed_keys`: how many keys the absorbed form multiplies for each token, where that is not what the token sees.
    """
    heads, latent, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    pairs = num_tokens * (num_keys - num_tokens) + num_tokens * (num_tokens + 1) // 2
    expanded = heads * (pairs * (nope + rope + value) + num_keys * latent * (nope + value))
    absorbed_pairs = pairs if absorbed_keys is None else num_tokens * absorbed_keys
    return expanded < heads * absorbed_pairs * (2 * latent + rope)


def _num_expanded(row: ForwardRow, config: ModelConfig, form: AttentionForm) -> int:
    """How many of a row's tokens, its first ones, attend in the expanded form."""
    topk = config.index_topk if config.has_indexer else row.context_len
    if form is AttentionForm.EXPANDED:
        if row.context_len > topk:
            raise ValueError(
                f"the expanded form attends to every key, but only {topk} of {row.context_len} are to be selected"
            )
        return row.num_tokens
    first_position = row.context_len - row.num_tokens
    # Those that see no more keys than are selected: scores would decide nothing for them.
    num_within = min(max(topk - first_position, 0), row.num_tokens)
    if form is AttentionForm.ABSORBED or not row.is_prefill or not num_within:
        return 0
    if first_position == 0 and num_within == row.num_tokens:
        return num_within  # a short prompt attends to itself
    return num_within if expanding_pays(config, num_within, first_position + num_within) else 0


def _part(row: ForwardRow, first: int, end: int) -> ForwardRow:
    """Some of a row's tokens as a row of their own."""
    context_len = row.context_len - row.num_tokens + end
    return ForwardRow(row.start + first, end - first, context_len, row.page_table, row.is_prefill)


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
    pages = page_tables[:, : -(-num_keys // context.page_size), None].long()
    offsets = torch.arange(context.page_size, device=page_tables.device)
    return (pages * context.page_size + offsets).flatten(1)[:, :num_keys]
