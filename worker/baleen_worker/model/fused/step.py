"""One step as the fused model computes it: its tokens put in order of how they attend, and what all layers share.

Tokens of rows with one token come first, then pieces of prompts that attend in the absorbed form, then pieces that
attend in the expanded form (see `attention_plan`). So each form works on neighbouring tokens.

Legend: T tokens, S rows of one token, P pages of the longest of them, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from baleen_worker.model.attention_plan import ExpandedRows, expanding_pays
from baleen_worker.staging import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.model.context import ForwardContext, ForwardRow
    from baleen_worker.model.fused.ops import FusedOps
    from baleen_worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class SingleRows:
    """S rows of one token each, the first S tokens.

    lengths [S] int32: keys that each sees. tables [S, P] int32. all_seen: no length exceeds K, so scores decide
    nothing. max_length: how many keys a row may have, which is the width of its scores.
    """

    lengths: Tensor
    tables: Tensor
    all_seen: bool
    max_length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens `first` .. `end` of one row, absorbed.

    lengths [end - first] int32: keys that each sees. table [P] int32, of the row's pages. all_seen as in `SingleRows`.
    """

    first: int
    end: int
    lengths: Tensor
    table: Tensor
    all_seen: bool


@dataclass(slots=True)
class FusedStep:
    """positions, kv_slots [T] int64 in the step's order; `order` and `back` [T] lead there and back, None if equal.

    `slots`: what each group selected last, by number; layers without an indexer read it. `plans`: of attention.
    `routing`: scores that `UniformRouting` made up for all layers.
    """

    positions: Tensor
    kv_slots: Tensor
    single: SingleRows | None
    pieces: Sequence[Piece] = ()
    expanded: ExpandedRows | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    schedule: Tensor | None = None
    routing: Tensor | None = None
    slots: dict[int, Tensor] = field(default_factory=dict[int, "Tensor"])
    plans: dict[int, Any] = field(default_factory=dict[int, Any])

    @property
    def num_absorbed(self) -> int:
        """Tokens that attend in the absorbed form: those before the expanded ones."""
        return self.positions.shape[0] - (0 if self.expanded is None else self.expanded.tokens.shape[0])

    @property
    def num_single(self) -> int:
        """S."""
        return 0 if self.single is None else self.single.lengths.shape[0]

    @property
    def only_single(self) -> bool:
        """Whether all rows have one token."""
        return not self.pieces and self.expanded is None

    @property
    def selects(self) -> bool:
        """Whether any token's scores decide which keys it attends to."""
        groups = [*self.pieces, *([] if self.single is None else [self.single])]
        return not all(group.all_seen for group in groups)


@dataclass(frozen=True, slots=True)
class _Span:
    """Some of a row's tokens: `first` .. `end` in the batch, the last of which sees `num_keys` keys."""

    row: ForwardRow
    first: int
    end: int
    num_keys: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


def plan_step(context: ForwardContext, config: ModelConfig, ops: FusedOps) -> FusedStep:
    """Groups the rows of a step. Nothing waits for the device."""
    device, topk = context.positions.device, config.index_topk
    single = [_Span(row, row.start, row.start + 1, row.context_len) for row in context.rows if row.num_tokens == 1]
    absorbed: list[_Span] = []
    expanded: list[_Span] = []
    for row in context.rows:
        if row.num_tokens > 1:
            _split(row, config, absorbed, expanded)
    spans = [*single, *absorbed, *expanded]
    order_on_host = np.concatenate([np.arange(span.first, span.end) for span in spans])
    order = back = None
    positions, kv_slots = context.positions, context.kv_slots
    if not np.array_equal(order_on_host, np.arange(len(order_on_host))):
        order, back = to_device(np.stack([order_on_host, np.argsort(order_on_host)]), device)
        positions, kv_slots = positions[order], kv_slots[order]
    lengths = (positions + 1).int()
    ends = list(accumulate(span.num_tokens for span in spans))
    pieces = [
        Piece(
            end - span.num_tokens,
            end,
            lengths[end - span.num_tokens : end],
            _table(span, context),
            span.num_keys <= topk,
        )
        for span, end in zip(absorbed, ends[len(single) :], strict=False)
    ]
    step = FusedStep(
        positions=positions,
        kv_slots=kv_slots,
        single=_single_rows(single, lengths, context, topk) if single else None,
        pieces=pieces,
        expanded=_expanded_rows(expanded, len(order_on_host), context) if expanded else None,
        order=order,
        back=back,
    )
    if step.single is not None and not step.single.all_seen:
        step.schedule = ops.schedule_of(step.single.lengths)
    return step


def _split(row: ForwardRow, config: ModelConfig, absorbed: list[_Span], expanded: list[_Span]) -> None:
    """The tokens that see no more than K keys may attend to all of them in the expanded form; the others may not."""
    start = row.context_len - row.num_tokens
    num_within = min(max(config.index_topk - start, 0), row.num_tokens)
    first = row.start
    if num_within and expanding_pays(config, num_within, start + num_within, absorbed_keys=config.index_topk):
        expanded.append(_Span(row, first, first + num_within, start + num_within))
        first += num_within
    if first < row.start + row.num_tokens:
        absorbed.append(_Span(row, first, row.start + row.num_tokens, row.context_len))


def _single_rows(spans: Sequence[_Span], lengths: Tensor, context: ForwardContext, topk: int) -> SingleRows:
    most = max(span.num_keys for span in spans)
    num_pages = -(-most // context.page_size)
    tables = torch.stack([_padded(_table(span, context), num_pages) for span in spans])
    return SingleRows(lengths[: len(spans)], tables, most <= topk, num_pages * context.page_size)


def _padded(table: Tensor, num_pages: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, num_pages - table.shape[0]))


def _table(span: _Span, context: ForwardContext) -> Tensor:
    return span.row.page_table[: -(-span.num_keys // context.page_size)].int()


def _expanded_rows(spans: Sequence[_Span], num_tokens: int, context: ForwardContext) -> ExpandedRows:
    total = sum(span.num_tokens for span in spans)
    offsets = torch.arange(context.page_size, device=context.positions.device)
    slots = [
        (_table(span, context).long()[:, None] * context.page_size + offsets).flatten()[: span.num_keys]
        for span in spans
    ]
    return ExpandedRows(
        tokens=torch.arange(num_tokens - total, num_tokens, device=context.positions.device),
        kv_slots=torch.cat(slots),
        cu_q=[0, *accumulate(span.num_tokens for span in spans)],
        cu_k=[0, *accumulate(span.num_keys for span in spans)],
    )
