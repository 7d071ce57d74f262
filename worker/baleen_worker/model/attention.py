"""Multi-head latent attention (MLA), restricted to the keys that the indexer selects.

Legend: T tokens, H heads, C latent width, R rotary width, N and V key and value width of a head without rotary part,
B rows of t tokens, n keys, K top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.mha_dense import mha_dense
from baleen_kernels.mha_partial import mha_partial
from baleen_kernels.mla_sparse import mla_selected, mla_sparse
from baleen_kernels.rope import rope
from torch import Tensor, nn

from baleen_worker.model.expanded import attend_expanded
from baleen_worker.model.indexer import Indexer, all_visible
from baleen_worker.model.linear import BlockLinear, RmsNorm
from baleen_worker.model.rope import softmax_scale

if TYPE_CHECKING:
    from baleen_worker.model.attention_plan import AbsorbedRows, AttentionStep, ExpandedRows
    from baleen_worker.model.numerics import Numerics
    from baleen_worker.model_config import ModelConfig

# As in the released code, the norms of the two latents keep this eps whatever rms_norm_eps of the config says.
_LATENT_NORM_EPS = 1e-6


class Attention(nn.Module):
    """MLA. With `q_lora_rank` the query goes through a latent of its own, which the indexer shares."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, layer: int, keep_fp8: bool) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.latent_dim = config.kv_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.softmax_scale = softmax_scale(config)

        def linear(in_features: int, out_features: int) -> BlockLinear:
            return BlockLinear(in_features, out_features, numerics=numerics, keep_fp8=keep_fp8)

        q_width = self.num_heads * (self.nope_dim + self.rope_dim)
        self.has_q_latent = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RmsNorm(config.q_lora_rank, eps=_LATENT_NORM_EPS)
            self.q_b_proj = linear(config.q_lora_rank, q_width)
        else:
            self.q_proj = linear(config.hidden_size, q_width)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, self.latent_dim + self.rope_dim)
        self.kv_a_layernorm = RmsNorm(self.latent_dim, eps=_LATENT_NORM_EPS)
        self.kv_b_proj = linear(self.latent_dim, self.num_heads * (self.nope_dim + self.value_dim))
        self.o_proj = linear(self.num_heads * self.value_dim, config.hidden_size)
        self.is_sparse = config.has_indexer
        owns_indexer = config.index_layers[layer]
        self.indexer = Indexer(config, numerics, layer=layer, keep_fp8=keep_fp8) if owns_indexer else None

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [T, hidden], normed -> [T, hidden]."""
        if self.has_q_latent:
            q_latent = self.q_a_layernorm(self.q_a_proj(x))  # [T, q_lora_rank]
            q = self.q_b_proj(q_latent)
        else:
            q_latent, q = None, self.q_proj(x)
        q_nope, q_rope = q.unflatten(1, (self.num_heads, -1)).split([self.nope_dim, self.rope_dim], -1)
        q_rope = self._rotate(q_rope, step)  # [T, H, R]

        kv_latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent_dim, self.rope_dim], -1)
        kv_latent = self.kv_a_layernorm(kv_latent)  # [T, C]
        k_rope = self._rotate(k_rope[:, None], step)[:, 0]  # [T, R], not normed, one for all heads
        step.pools.write_latent(self.layer, step.kv_slots, kv_latent, k_rope)
        if self.indexer is not None:
            self.indexer.write_keys(x, step)

        heads = x.new_empty(x.shape[0], self.num_heads, self.value_dim)  # [T, H, V]
        if (expanded := step.plan.expanded) is not None:
            tokens = expanded.tokens
            heads[tokens] = self._attend_expanded(q_nope[tokens], q_rope[tokens], expanded, step)
        for group, rows in enumerate(step.plan.absorbed):
            picks = self._select(group, rows, x, q_latent, step)
            heads[rows.tokens] = self._attend_absorbed(q_nope[rows.tokens], q_rope[rows.tokens], picks, rows, step)
        return self.o_proj(heads.flatten(1))

    def _select(
        self, group: int, rows: AbsorbedRows, x: Tensor, q_latent: Tensor | None, step: AttentionStep
    ) -> Tensor:
        """Positions [B * t, K] of the keys to attend to; a layer without an indexer takes the last selection made."""
        if not self.is_sparse:
            return all_visible(rows)
        if self.indexer is not None and q_latent is not None:
            step.selections[group] = self.indexer(x, q_latent, rows, step)
        return step.selections[group]

    def _rotate(self, x: Tensor, step: AttentionStep) -> Tensor:
        return rope(x, step.rotary.cos, step.rotary.sin, rope_interleaved=True)

    def _attend_expanded(self, q_nope: Tensor, q_rope: Tensor, rows: ExpandedRows, step: AttentionStep) -> Tensor:
        """Keys and values per head, every visible key: [Te, H, N | R] -> [Te, H, V]."""

        def expand(kv_slots: Tensor) -> tuple[Tensor, Tensor]:
            kv_latent, k_rope = step.pools.read_latent(self.layer, kv_slots)  # [n, C], [n, R]
            kv = self.kv_b_proj(kv_latent).unflatten(1, (self.num_heads, -1))  # [n, H, N + V]
            k_nope, v = kv.split([self.nope_dim, self.value_dim], -1)
            return torch.cat([k_nope, k_rope[:, None].expand(-1, self.num_heads, -1)], -1), v  # [n, H, N + R]

        q = torch.cat([q_nope, q_rope], -1)
        return attend_expanded(q, rows, expand, softmax_scale=self.softmax_scale, whole=mha_dense, partial=mha_partial)

    def _attend_absorbed(
        self, q_nope: Tensor, q_rope: Tensor, picks: Tensor, rows: AbsorbedRows, step: AttentionStep
    ) -> Tensor:
        """Queries in latent space, the picked latents as keys and values: [B * t, H, N | R] -> [B * t, H, V]."""
        up = self.kv_b_proj.plain_weight().unflatten(0, (self.num_heads, -1))  # [H, N + V, C]
        up_k, up_v = up.split([self.nope_dim, self.value_dim], 1)
        q_latent = torch.einsum("thn,hnc->thc", q_nope, up_k)
        row = torch.arange(rows.kv_slots.shape[0], device=picks.device).repeat_interleave(rows.tokens_per_row)[:, None]
        # Reads either every key of the rows or the picked ones, whichever is less: a long prompt piece uses most keys
        # many times, a decode row few keys of many.
        if picks.numel() > rows.kv_slots.numel():
            kv_latent, k_rope = step.pools.read_latent(self.layer, rows.kv_slots.flatten())  # [B * n, C], [B * n, R]
            indices = torch.where(picks < 0, -1, picks + row * rows.num_keys)
            out = mla_sparse(q_latent, q_rope, kv_latent, k_rope, indices, softmax_scale=self.softmax_scale)
        else:
            slots = rows.kv_slots[row, picks.clamp(min=0).long()]  # [B * t, K]
            kv_latent, k_rope = step.pools.read_latent(self.layer, slots.flatten())
            keys = kv_latent.unflatten(0, slots.shape), k_rope.unflatten(0, slots.shape)
            out = mla_selected(q_latent, q_rope, *keys, picks >= 0, softmax_scale=self.softmax_scale)
        return torch.einsum("thc,hvc->thv", out, up_v)
