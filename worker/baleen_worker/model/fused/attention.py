"""Attention of the fused model: few large matrix products, and one op for everything between two of them.

Legend: T tokens, H heads, N and V key and value width of a head without rotary part, R rotary width, A query latent,
C key-value latent, D index width, J index heads, K top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from baleen_kernels import index_key_pack, latent_pack, selection, value_quant
from baleen_kernels.fp8_quant import GROUP

from baleen_worker.model.expanded import attend_expanded
from baleen_worker.model.rope import softmax_scale

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.cache.storage import PagedPools
    from baleen_worker.model.fused.beside import Beside
    from baleen_worker.model.fused.ops import FusedOps
    from baleen_worker.model.fused.step import FusedStep, Piece, SingleRows
    from baleen_worker.model.fused.weights import AttentionWeights, Fp8Matrix
    from baleen_worker.model_config import ModelConfig

Fp8 = tuple["Tensor", "Tensor"]  # values [T, N] and scales [T, N / 128]

# Bytes of index scores that are held at a time: those of 8192 tokens and 32K keys, which then need not be put together.
_MAX_SCORE_BYTES = 1 << 30


class FusedAttention:
    """One layer's. Stateless: keys live in the pools, selections in the step."""

    def __init__(
        self,
        layer: int,
        weights: AttentionWeights,
        config: ModelConfig,
        ops: FusedOps,
        cos_sin: Tensor,
        *,
        dtype: torch.dtype,
        scale_ue8m0: bool,
        beside: Beside,
    ) -> None:
        self._beside = beside
        self._layer, self._weights, self._ops, self._cos_sin = layer, weights, ops, cos_sin
        self._dtype, self._ue8m0 = dtype, scale_ue8m0
        self._heads, self._value_width = config.num_attention_heads, config.v_head_dim
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._latent = config.kv_lora_rank
        self._index_heads, self._index_width = config.index_n_heads, config.index_head_dim
        self._topk = config.index_topk
        self._softmax_scale = softmax_scale(config)
        # Where scores decide nothing no score is read, but the op wants a row of them.
        self._no_scores = torch.zeros(self._topk, device=cos_sin.device)

    def __call__(self, y: Tensor, rounded: Fp8, step: FusedStep, pools: PagedPools) -> Tensor:
        """y [T, hidden], normed, and the same in FP8 -> [T, hidden]."""
        w, ops, num_tokens = self._weights, self._ops, y.shape[0]
        selects = w.indexer is not None and step.selects
        head_weights = self._beside.start(lambda: self._head_weights(y, selects=selects), num_tokens=num_tokens)
        x = self._product(rounded, w.in_proj)
        num_index = 0 if w.indexer is None else self._index_width
        latents = pools.latent_store(self._layer)
        where = self._cos_sin, step.positions, step.kv_slots
        q_latent = ops.mla_prep(x[:, num_index:], w.q_norm, w.kv_norm, *where, latents, scale_ue8m0=self._ue8m0)
        q_width = self._heads * (self._nope + self._rope)
        q_all = self._product(q_latent, w.q_proj if selects else w.q_proj.rows(q_width))
        q = q_all[:, :q_width].unflatten(1, (self._heads, -1))  # [T, H, N + R]
        weights_of_heads, num_absorbed = head_weights.join(), step.num_absorbed
        prepared = scores = None
        if w.indexer is not None:
            prepared = self._prepare_index(q_all[:, q_width:], x[:, :num_index], weights_of_heads, step, pools)
            scores = self._score_single(*prepared, step)
        # Beside the selection, but launched after it: its blocks leave no room for the selection's clusters.
        fork = self._beside.fork(num_tokens=num_tokens)
        if prepared is not None:
            self._select(*prepared, scores, step)
        absorbed_queries = fork.start(lambda: self._absorb(q[:num_absorbed], step)).join()
        if num_tokens <= value_quant.MOST_TOKENS and self._value_width == GROUP and step.only_single:
            latent = self._attend_single(absorbed_queries, step, latents)
            return self._product(ops.value_quant(latent, w.up_v, scale_ue8m0=self._ue8m0), w.o_proj)
        heads = torch.empty(num_tokens, self._heads, self._value_width, dtype=self._dtype, device=y.device)
        if num_absorbed:
            self._attend_absorbed(absorbed_queries, heads[:num_absorbed], step, latents)
        if step.expanded is not None:
            positions = step.positions[num_absorbed:]
            ops.rotate_queries(q[num_absorbed:], self._cos_sin, positions)
            heads[num_absorbed:] = self._attend_expanded(q[num_absorbed:], step, latents)
        return self._product(ops.fp8_quant(heads.flatten(1), scale_ue8m0=self._ue8m0), w.o_proj)

    def _product(self, x: Fp8, matrix: Fp8Matrix) -> Tensor:
        return self._ops.product(x, matrix, self._dtype)

    def _head_weights(self, y: Tensor, *, selects: bool) -> Tensor:
        """[T, J] float32; [T, 0] where nothing is scored."""
        w = self._weights.indexer
        if w is None or not selects:
            return y.new_empty(y.shape[0], 0, dtype=torch.float32)
        return self._ops.wide_gemm(y, w.head_weights)

    def _absorb(self, q: Tensor, step: FusedStep) -> Tensor:
        return self._ops.absorb_queries(q, self._cos_sin, step.positions[: q.shape[0]], self._weights.up_k)

    def _prepare_index(
        self, q: Tensor, k: Tensor, head_weights: Tensor, step: FusedStep, pools: PagedPools
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stores every token's index key, whether or not anything is scored now: later tokens will score it.

        -> index queries [T, J, D] in FP8, their weights [T, J], the layer's pages; J is 0 where nothing is scored.
        """
        w, ops = self._weights.indexer, self._ops
        assert w is not None
        num_heads = head_weights.shape[1]
        q = q[:, : num_heads * self._index_width].unflatten(1, (num_heads, self._index_width))
        pages = pools.index_store(self._layer)
        where = self._cos_sin, step.positions, step.kv_slots
        norm = w.norm_weight, w.norm_bias
        values, weights = ops.indexer_prep(q, k, head_weights, *norm, *where, pages, scale_ue8m0=True)
        return values, weights, pages

    def _score_single(self, values: Tensor, weights: Tensor, pages: Tensor, step: FusedStep) -> Tensor | None:
        """[S, keys] of rows of one token; None where nothing is scored."""
        rows = step.single
        if rows is None or rows.all_seen or values.shape[1] == 0:
            return None
        queries, places = (values[: step.num_single], weights[: step.num_single]), (rows.lengths, rows.tables)
        return self._ops.paged_scores(*queries, pages, *places, step.schedule, max_length=rows.max_length)

    def _select(self, values: Tensor, weights: Tensor, pages: Tensor, scores: Tensor | None, step: FusedStep) -> None:
        """A layer that owns an indexer selects anew; what is left from the layer before is void."""
        step.slots.clear()
        if values.shape[1] == 0:
            return
        if scores is not None:
            assert step.single is not None
            step.slots[-1] = self._ops.topk_slots(scores, step.single.lengths, step.single.tables, topk=self._topk)
        for number, piece in enumerate(step.pieces):
            if not piece.all_seen:
                step.slots[number] = self._select_piece(values, weights, piece, pages)

    def _select_piece(self, values: Tensor, weights: Tensor, piece: Piece, pages: Tensor) -> Tensor:
        """Scores some tokens at a time against all keys of the row."""
        keys, scales = index_key_pack.gather_index_keys(pages, piece.table)
        size = max(1, _MAX_SCORE_BYTES // (4 * keys.shape[0]))
        num_tokens = piece.end - piece.first
        first_row = torch.zeros(num_tokens, dtype=torch.int32, device=values.device)
        selected: list[Tensor] = []
        for start in range(0, num_tokens, size):
            part = slice(start, min(start + size, num_tokens))
            tokens = slice(piece.first + part.start, piece.first + part.stop)
            lengths, zeros = piece.lengths[part], first_row[part]
            scores = self._ops.ragged_scores(values[tokens], weights[tokens], keys, scales, zeros, lengths)
            selected.append(self._ops.topk_slots(scores, lengths, piece.table[None], zeros, topk=self._topk))
        return torch.cat(selected) if len(selected) > 1 else selected[0]

    def _slots(self, step: FusedStep, number: int, group: SingleRows | Piece) -> Tensor:
        """[t, K] int32: what the group's tokens attend to."""
        if number not in step.slots:
            assert group.all_seen
            num_tokens = group.lengths.shape[0]
            scores = self._no_scores.expand(num_tokens, -1)
            if hasattr(group, "tables"):
                tables, rows = group.tables, None  # pyright: ignore[reportAttributeAccessIssue]
            else:
                tables, rows = group.table[None], torch.zeros_like(group.lengths)  # pyright: ignore[reportAttributeAccessIssue]
            step.slots[number] = self._ops.topk_slots(scores, group.lengths, tables, rows, topk=self._topk)
        return step.slots[number]

    def _attend_absorbed(self, absorbed: Tensor, heads: Tensor, step: FusedStep, latents: Tensor) -> None:
        """Queries in latent space over selected slots of the pool; fills heads [t, H, V]."""
        w = self._weights

        if step.single is not None:
            end = step.num_single
            latent = self._attend_single(absorbed[:end], step, latents)
            torch.bmm(latent.transpose(0, 1), w.up_v, out=heads[:end].transpose(0, 1))
        for number, piece in enumerate(step.pieces):
            q, slots = absorbed[piece.first : piece.end], self._slots(step, number, piece)
            latent = self._attend(selection.PREFILL, q, slots, step, number, latents)  # [t, H, C]
            torch.bmm(latent.transpose(0, 1), w.up_v, out=heads[piece.first : piece.end].transpose(0, 1))

    def _attend_single(self, q: Tensor, step: FusedStep, latents: Tensor) -> Tensor:
        """-> [S, H, C]."""
        assert step.single is not None
        return self._attend(selection.DECODE, q, self._slots(step, -1, step.single), step, -1, latents)

    def _attend(self, role: str, q: Tensor, slots: Tensor, step: FusedStep, number: int, latents: Tensor) -> Tensor:
        if number not in step.plans:
            step.plans[number] = self._ops.attention_plan(role)
        call = self._ops.attend_decode if role == selection.DECODE else self._ops.attend_prefill
        return call(q, latents, slots, softmax_scale=self._softmax_scale, plan=step.plans[number])

    def _attend_expanded(self, q: Tensor, step: FusedStep, latents: Tensor) -> Tensor:
        assert step.expanded is not None
        w, ops = self._weights, self._ops

        def expand(kv_slots: Tensor) -> tuple[Tensor, Tensor]:
            packed = latents.index_select(0, kv_slots)
            sizes: dict[str, Any] = {"latent": self._latent, "rope": self._rope, "dtype": self._dtype}
            unpack = latent_pack.unpack_latent_fp8 if packed.dtype == torch.uint8 else latent_pack.unpack_latent_plain
            kv_latent, k_rope = unpack(packed, **sizes)  # [n, C], [n, R]
            # The same matrices as in the absorbed form, so that a token does not depend on which of the two it meets.
            num_keys, by_head = kv_latent.shape[0], kv_latent.expand(self._heads, -1, -1)
            k = torch.empty(num_keys, self._heads, self._nope + self._rope, dtype=self._dtype, device=q.device)
            v = torch.empty(num_keys, self._heads, self._value_width, dtype=self._dtype, device=q.device)
            torch.bmm(by_head, w.up_k.transpose(1, 2), out=k[..., : self._nope].transpose(0, 1))
            torch.bmm(by_head, w.up_v, out=v.transpose(0, 1))
            k[..., self._nope :] = k_rope[:, None]
            return k, v

        return attend_expanded(
            q,
            step.expanded,
            expand,
            softmax_scale=self._softmax_scale,
            whole=ops.mha_dense,
            partial=ops.mha_partial,
        )
