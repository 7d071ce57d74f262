"""The lightning indexer: which keys each token attends to (paper formulas 1 and 2).

Legend: T tokens, J index heads, D index head width, R rotary width, B rows of t tokens, n keys, K top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.fp8_quant import round_groups
from baleen_kernels.hadamard import hadamard
from baleen_kernels.index_logits import index_logits
from baleen_kernels.index_topk import index_topk
from baleen_kernels.rope import rope
from torch import Tensor, nn

from baleen_worker.model.linear import BlockLinear, LayerNorm, Linear

if TYPE_CHECKING:
    from baleen_worker.model.attention_plan import AbsorbedRows, AttentionStep
    from baleen_worker.model.numerics import Numerics
    from baleen_worker.model.rope import RotaryTable
    from baleen_worker.model_config import ModelConfig

# The eps of the index keys' norm is part of the architecture; rms_norm_eps of the config does not apply to it.
_KEY_NORM_EPS = 1e-6
# Index scores held at a time (32 MiB): long prompts select in pieces.
_CHUNK_SCORES = 1 << 23
# On a CPU, tokens that select at a time: the fewer, the fewer keys that none of them sees are scored.
_HOST_CHUNK_TOKENS = 128


class Indexer(nn.Module):
    """Scores all visible keys of a token with J small heads and selects the best K."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, layer: int, keep_fp8: bool) -> None:
        super().__init__()
        if config.q_lora_rank is None:
            raise ValueError("the indexer reads the query latent, but q_lora_rank is null")
        if numerics.index_hadamard and config.index_head_dim & (config.index_head_dim - 1):
            raise ValueError(f"index_hadamard needs a power of two, not an index_head_dim of {config.index_head_dim}")
        self.layer = layer
        self.numerics = numerics
        self.num_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk = config.index_topk
        self.wq_b = BlockLinear(
            config.q_lora_rank, self.num_heads * self.head_dim, numerics=numerics, keep_fp8=keep_fp8
        )
        self.wk = BlockLinear(config.hidden_size, self.head_dim, numerics=numerics, keep_fp8=keep_fp8)
        self.k_norm = LayerNorm(self.head_dim, eps=_KEY_NORM_EPS)
        self.weights_proj = Linear(config.hidden_size, self.num_heads, dtype=torch.float32)

    def write_keys(self, x: Tensor, step: AttentionStep) -> None:
        """Stores the index key of every token x [T, hidden]: later tokens score it however this step attends."""
        k = self.k_norm(self.wk(x))[:, None]  # [T, 1, D]
        step.pools.write_index_k(self.layer, step.kv_slots, self._rotate(k, step.rotary)[:, 0])

    def forward(self, x: Tensor, q_latent: Tensor, rows: AbsorbedRows, step: AttentionStep) -> Tensor:
        """x [T, hidden] and q_latent [T, q_lora_rank], both normed -> positions [B * t, K'] int32, padded with -1.

        K' = min(K, n). The index keys of all visible positions are in the pools.
        """
        if rows.num_keys <= self.topk:
            return all_visible(rows)
        q = self.wq_b(q_latent[rows.tokens]).unflatten(1, (self.num_heads, self.head_dim))  # [B * t, J, D]
        q = self._rotate(q, step.rotary.at(rows.tokens))
        if self.numerics.index_q_fp8:
            q = round_groups(q, scale_ue8m0=True)
        w = self.weights_proj(x[rows.tokens].float()) * self.num_heads**-0.5 * self.head_dim**-0.5  # [B * t, J]
        k = step.pools.read_index_k(self.layer, rows.kv_slots.flatten())
        return self._select(q, w, k.unflatten(0, rows.kv_slots.shape), rows)

    def _rotate(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Rotates the *first* R channels of x [T, heads, D] in half-split pairs; the main attention differs in both."""
        x_rope, x_rest = x.split([self.rope_dim, self.head_dim - self.rope_dim], -1)
        x = torch.cat([rope(x_rope, rotary.cos, rotary.sin, rope_interleaved=False), x_rest], -1)
        return hadamard(x) if self.numerics.index_hadamard else x

    def _select(self, q: Tensor, w: Tensor, k: Tensor, rows: AbsorbedRows) -> Tensor:
        """q [B * t, J, D], w [B * t, J], k [B, n, D] -> positions [B * t, K]."""
        (num_rows, num_keys), t = rows.kv_slots.shape, rows.tokens_per_row
        q, w = q.unflatten(0, (num_rows, t)), w.unflatten(0, (num_rows, t))
        num_visible = rows.num_visible.view(num_rows, t)
        size = max(1, _CHUNK_SCORES // (num_rows * num_keys))
        if not q.is_cuda:
            size = min(size, _HOST_CHUNK_TOKENS)
        picks: list[Tensor] = []
        for start in range(0, t, size):
            chunk = slice(start, min(start + size, t))
            visible = num_visible[:, chunk].flatten()
            # The tokens of one row sit at its end, so a chunk sees no further than its own last token …
            seen = num_keys if num_rows > 1 else num_keys - t + chunk.stop
            if seen <= self.topk:  # … and where that is no more than K, scores would decide nothing.
                chosen = _first(visible, self.topk)
            else:
                scores = index_logits(q[:, chunk], k[:, :seen], w[:, chunk]).flatten(0, 1)
                chosen = index_topk(scores, visible, topk=self.topk)
            picks.append(chosen.unflatten(0, (num_rows, -1)))
        return torch.cat(picks, 1).flatten(0, 1)


def all_visible(rows: AbsorbedRows) -> Tensor:
    """Positions [B * t, n] of every visible key, padded with -1: the selection where nothing is left out."""
    return _first(rows.num_visible, rows.num_keys)


def _first(num_visible: Tensor, width: int) -> Tensor:
    """Positions [T, width] int32 of the first `num_visible` [T] keys, padded with -1."""
    positions = torch.arange(width, dtype=torch.int32, device=num_visible.device)
    return torch.where(positions < num_visible[:, None], positions, -1)
