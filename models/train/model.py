"""The whole model for training: decoder layers, head, and the multi-token-prediction layer, under checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from models.train.attention import Attention, Pass, Selection
from models.train.config import Config
from models.train.layers import Linear, Mlp, MoE, RmsNorm
from models.train.rotary import frequencies

_NUM_CONSTANT = 4  # residual channels that start equal for all tokens


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        gain = (2 * (config.num_hidden_layers + 1)) ** -0.5 if layer else 1.0
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, gain=gain)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, gain=gain) if dense else MoE(config, gain=gain)

    def forward(
        self, x: Tensor, step: Pass, reused: Selection | None = None
    ) -> tuple[Tensor, Tensor | None, Selection | None]:
        """The residual stream [B, T, hidden], what the attention says about its indexer, and the selection."""
        attended, stats, selected = self.self_attn(self.input_layernorm(x), step, reused)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), stats, selected


class SharedHead(nn.Module):
    """The norm before the multi-token-prediction layer's logits; the head itself is the main one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """Predicts the token after next from a position's final state and the next token's embedding."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.enorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, quantised=False)
        self.shared_head = SharedHead(config)

    def predict(self, hidden: Tensor, next_embedding: Tensor, step: Pass) -> tuple[Tensor, Tensor | None]:
        """hidden [B, T, hidden] after the main norm, embeddings of the tokens after them -> [B, T, hidden]."""
        joined = torch.cat([self.enorm(next_embedding), self.hnorm(hidden)], -1)
        x, stats, _ = self(self.eh_proj(joined), step)
        return self.shared_head.norm(x), stats


class Trunk(nn.Module):
    """The checkpoint's `model.` subtree; the last of `layers` is the multi-token-prediction layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.layers.append(MtpLayer(config, config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class MicroModel(nn.Module):
    """ids in, final states out; `logits` and `mtp_logits` read them."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, quantised=False)
        self._initialise()

    def forward(self, ids: Tensor, step: Pass) -> tuple[Tensor, list[Tensor | None]]:
        """ids [B, T] -> states after the final norm [B, T, hidden], and each layer's word on its indexer."""
        x, all_stats = self._decode(ids, step, self.config.num_hidden_layers)
        return self.model.norm(x), all_stats

    def sharing(self, ids: Tensor, step: Pass) -> list[Tensor | None]:
        """ids [B, T] -> what the layers up to the last that reuses a selection say on their indexers."""
        return self._decode(ids, step, step.pattern.rindex("S") + 1)[1]

    def _decode(self, ids: Tensor, step: Pass, num_layers: int) -> tuple[Tensor, list[Tensor | None]]:
        all_stats: list[Tensor | None] = []
        selected: Selection | None = None
        x = self.model.embed_tokens(ids).to(self.dtype)
        for number, layer in enumerate(self.model.layers[:num_layers]):
            x, stats, selected = layer(x, step, selected if step.reuses(number) else None)
            all_stats.append(stats)
        return x, all_stats

    def mtp(self, hidden: Tensor, next_ids: Tensor, step: Pass) -> tuple[Tensor, Tensor | None]:
        """States of the multi-token-prediction layer; `next_ids` [B, T] are the tokens after those of `hidden`."""
        layer = self.model.layers[-1]
        assert isinstance(layer, MtpLayer)
        return layer.predict(hidden, self.model.embed_tokens(next_ids).to(self.dtype), step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final states -> logits, of either layer."""
        return self.lm_head(hidden if self.training else hidden.float())

    def moe_layers(self) -> Iterator[MoE]:
        """The layers whose experts want balancing."""
        return (module for module in self.modules() if isinstance(module, MoE))

    def index_parameters(self, patterns: Sequence[str] = ("",)) -> list[nn.Parameter]:
        """What only the indexers' loss trains: of every indexer, or of those whose selections the patterns share."""
        shared = {number for pattern in patterns for number in range(len(pattern)) if pattern[number:][:2] == "FS"}
        layers = [layer for number, layer in enumerate(self.model.layers) if number in shared or not any(patterns)]
        return [parameter for layer in layers for parameter in layer.self_attn.indexer.parameters()]

    @torch.no_grad()
    def _initialise(self) -> None:
        """Five heads of the first layer start by looking back one to five tokens.

        Lookup by content needs each position to know the tokens before it. Trained from random weights that step is
        found late; here it is the start. Four channels of the residual stream start equal for all tokens, and the
        rotary parts of query and key are made from them.
        """
        c = self.config
        embedding = self.model.embed_tokens.weight
        embedding.normal_(0, 0.5)
        embedding[:, :_NUM_CONSTANT] = 1.0
        self.lm_head.weight.normal_(0, 0.02)
        attention = self.model.layers[0].self_attn
        channel = 1.0 / (0.25 * (c.hidden_size - _NUM_CONSTANT) / c.hidden_size + _NUM_CONSTANT / c.hidden_size) ** 0.5
        # The first channel of the query latent becomes a constant.
        attention.q_a_proj.weight[0] = 0.0
        attention.q_a_proj.weight[0, :_NUM_CONSTANT] = 1.0
        total = _NUM_CONSTANT * channel
        constant = total / ((c.q_lora_rank - 1 + total**2) / c.q_lora_rank) ** 0.5
        key = attention.kv_a_proj_with_mqa.weight[c.kv_lora_rank :]
        key.zero_()
        key[0::2, :_NUM_CONSTANT] = 6.0 / total  # every pair points the same way before it is turned
        per_head = attention.q_b_proj.weight.view(c.num_attention_heads, -1, c.q_lora_rank)
        angle = frequencies(c)
        for head in range(min(5, c.num_attention_heads)):
            per_head[head] *= 0.1
            turned = per_head[head, c.qk_nope_head_dim :]
            turned.zero_()
            turned[0::2, 0] = (angle * -(head + 1)).cos() * 6.0 / constant
            turned[1::2, 0] = (angle * -(head + 1)).sin() * 6.0 / constant
