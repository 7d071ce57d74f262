"""Multi-head latent attention and the lightning indexer, for training on whole rows of tokens.

Legend: B rows, T tokens of each, H heads, N/R/V width of a head's plain, rotary and value part, J index heads, D index
width, S sampled query positions, K top-k.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.train.config import Config
from models.train.layers import LayerNorm, Linear, RmsNorm
from models.train.rotary import rotate_halves, rotate_pairs

_SCORE_ROWS = 512  # query positions whose index scores are held at a time


class Mode(enum.Enum):
    """What tokens attend to, and what the indexers learn from.

    DENSE: every key, no indexer. WARM_UP: every key, and the indexers learn from every key. SPARSE: the selected keys,
    and the indexers learn from these. SHARE: the selected keys, and the indexers learn from every key.
    """

    DENSE = "dense"
    WARM_UP = "warm-up"
    SPARSE = "sparse"
    SHARE = "share"


def is_pattern(text: str) -> bool:
    """Whether `Pass.pattern` can be this: letters F and S, the first one F, or none."""
    return re.fullmatch("(F[FS]*)?", text) is not None


@dataclass(frozen=True)
class Pass:
    """What one forward pass shares between layers.

    sampled: [B, S] positions at which the indexer is compared with the attention, or None.
    pattern: `index_topk_pattern` of config.json: layers with an "S" reuse the selection of the layer before them, all
    others make their own.
    """

    mode: Mode
    cos: Tensor
    sin: Tensor
    sampled: Tensor | None = None
    pattern: str = ""

    def reuses(self, layer: int) -> bool:
        """Whether a layer goes by the selection of the layer before it."""
        return self.pattern[layer : layer + 1] == "S"


@dataclass(frozen=True)
class Selection:
    """What an indexer projected (q [B, T, J, D], k [B, T, D], w [B, T, J]) and which keys it chose for each token.

    chosen: [B, T, T] bool, or None where every key is attended to.
    """

    index: tuple[Tensor, Tensor, Tensor]
    chosen: Tensor | None


class Indexer(nn.Module):
    """Scores keys with J small heads. Its input is detached: only its own loss trains it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = Linear(config.hidden_size, config.index_head_dim)
        self.k_norm = LayerNorm(config.index_head_dim)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, quantised=False)

    def project(self, x: Tensor, q_latent: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, hidden], q_latent [B, T, rank] -> q [B, T, J, D], k [B, T, D], w [B, T, J] float32."""
        c, x, q_latent = self.config, x.detach(), q_latent.detach()
        q = self._rotate(self.wq_b(q_latent).unflatten(-1, (c.index_n_heads, c.index_head_dim)), step)
        k = self._rotate(self.k_norm(self.wk(x))[:, :, None], step)[:, :, 0]
        w = self.weights_proj(x.float()) * c.index_n_heads**-0.5 * c.index_head_dim**-0.5
        return q, k, w

    def _rotate(self, x: Tensor, step: Pass) -> Tensor:
        width = self.config.qk_rope_head_dim
        return torch.cat([rotate_halves(x[..., :width], step.cos, step.sin), x[..., width:]], -1)


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [B, S, J, D], k [B, T, D], w [B, S, J] -> [B, S, T] float32."""
    logits = torch.einsum("bsjd,btd->bsjt", q, k)
    return (torch.relu(logits.float()) * w[..., None].float()).sum(2)


@functools.cache
def _compiled_scores() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(index_scores)


@torch.compiler.disable
@torch.no_grad()
def selection(q: Tensor, k: Tensor, w: Tensor, topk: int) -> Tensor:
    """Which keys each token attends to, [B, T, T] bool: the `topk` best among those it can see."""
    batch, length = k.shape[:2]
    mask = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    if length <= topk:
        return mask.expand(batch, -1, -1)
    scores_of = _compiled_scores() if k.is_cuda else index_scores
    chosen = torch.empty(batch, length, length, dtype=torch.bool, device=k.device)
    for row in range(batch):
        one = slice(row, row + 1)
        for start in range(0, length, _SCORE_ROWS):
            part = slice(start, min(start + _SCORE_ROWS, length))
            scores = scores_of(q[one, part], k[one], w[one, part])[0].masked_fill(~mask[part], -torch.inf)
            lowest = scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
            chosen[row, part] = (scores >= lowest) & mask[part]
    return chosen


class Attention(nn.Module):
    """MLA in its expanded form, with the indexer's selection as a mask."""

    def __init__(self, config: Config, *, gain: float) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + rope)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (nope + value))
        self.o_proj = Linear(heads * value, hidden, gain=gain)
        self.indexer = Indexer(config)

    def forward(
        self, x: Tensor, step: Pass, reused: Selection | None = None
    ) -> tuple[Tensor, Tensor | None, Selection | None]:
        """x [B, T, hidden], normed -> [B, T, hidden]; with samples, the indexer's loss and recall; the selection.

        `reused`: the selection of the layer before, for a layer that makes none of its own.
        """
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = self.q_b_proj(q_latent).unflatten(-1, (heads, -1)).split([nope, c.qk_rope_head_dim], -1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, step.cos, step.sin)], -1).transpose(1, 2)  # [B, H, T, N + R]
        kv_latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv_latent = self.kv_a_layernorm(kv_latent)
        k_rope = rotate_pairs(k_rope[:, :, None], step.cos, step.sin).expand(-1, -1, heads, -1)
        k_nope, v = self.kv_b_proj(kv_latent).unflatten(-1, (heads, -1)).split([nope, c.v_head_dim], -1)
        k, v = torch.cat([k_nope, k_rope], -1).transpose(1, 2), v.transpose(1, 2)

        selected, stats = None, None
        if step.mode is not Mode.DENSE:
            selected = self._select(x, q_latent, step) if reused is None else reused
            if step.sampled is not None:
                learned_from = selected.chosen if step.mode is Mode.SPARSE else None
                stats = self._compare(q.detach(), k.detach(), selected.index, learned_from, step.sampled)
        out = attend(q, k, v, None if selected is None else selected.chosen, c.softmax_scale)
        return self.o_proj(out.transpose(1, 2).flatten(2)), stats, selected

    def _select(self, x: Tensor, q_latent: Tensor, step: Pass) -> Selection:
        index = self.indexer.project(x, q_latent, step)
        return Selection(index, None if step.mode is Mode.WARM_UP else selection(*index, self.config.index_topk))

    def _compare(
        self, q: Tensor, k: Tensor, index: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, sampled: Tensor
    ) -> Tensor:
        """[2]: the KL of the index scores from the attention summed over heads, at the sampled positions, over
        allowed keys; and the share of that attention on the indexer's best keys.

        Layers that share a selection are each compared with the one indexer. The sum of these losses has the gradient
        of the KL from the mean of their attention: IndexCache's multi-layer distillation.
        """
        length, topk = k.shape[2], self.config.index_topk
        causal = torch.arange(length, device=k.device) <= sampled[..., None]  # [B, S, T]
        visible = causal if mask is None else mask.gather(1, sampled[..., None].expand(-1, -1, length))
        rows = sampled[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        logits = torch.einsum("bhsd,bhtd->bhst", q.gather(2, rows), k).float() * self.config.softmax_scale
        target = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)  # [B, S, T], sums to 1
        q_index, k_index, w = index
        q_rows = q_index.gather(1, sampled[..., None, None].expand(-1, -1, *q_index.shape[2:]))
        w_rows = w.gather(1, sampled[..., None].expand(-1, -1, w.shape[2]))
        scores = index_scores(q_rows, k_index, w_rows).masked_fill(~visible, -torch.inf)
        log_scores = scores.log_softmax(-1).masked_fill(~visible, 0.0)
        loss = (torch.special.xlogy(target, target) - target * log_scores).sum(-1).mean()
        if mask is None:
            best = scores.detach().topk(min(topk, length), -1).indices
            return torch.stack([loss, target.gather(-1, best).sum(-1).mean()])
        everything = logits.masked_fill(~causal[:, None], -torch.inf).softmax(-1).mean(1)
        return torch.stack([loss, (everything * visible).sum(-1).mean()])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q, k [B, H, T, N + R], v [B, H, T, V], mask [B, T, T] or None for causal -> [B, H, T, V]."""
    attention = nn.functional.scaled_dot_product_attention
    if mask is not None:
        return attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    if not q.is_cuda:
        return attention(q, k, v, is_causal=True, scale=scale)
    # The fast kernel wants one width for keys and values.
    wide = nn.functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
    return attention(q, k, wide, is_causal=True, scale=scale)[..., : v.shape[-1]]
