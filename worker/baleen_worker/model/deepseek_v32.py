"""DeepSeek-V3.2, and DeepSeek-V3 where the config has no indexer: embedding, decoder layers, norm, head.

Module paths equal checkpoint keys, so `state_dict()` lists the tensors a checkpoint has to hold. The model owns no
state of requests: keys live in the pools that it is given.

Legend: T tokens of the step, N tokens whose logits are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from baleen_kernels.fp8_quant import TILE
from torch import Tensor, nn

from baleen_worker.model.attention import Attention
from baleen_worker.model.attention_plan import AttentionForm, AttentionStep, plan_attention
from baleen_worker.model.linear import Embedding, Linear, RmsNorm
from baleen_worker.model.moe import Mlp, MoE
from baleen_worker.model.rope import rotary_frequencies, rotary_magnitude, rotary_table

if TYPE_CHECKING:
    from baleen_worker.model.context import ForwardContext, KvPools
    from baleen_worker.model.numerics import Numerics
    from baleen_worker.model_config import ModelConfig


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, layer: int, keep_fp8: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, numerics, layer=layer, keep_fp8=keep_fp8)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.is_moe_layer(layer):
            self.mlp = MoE(config, numerics, keep_fp8=keep_fp8)
        else:
            self.mlp = Mlp(config.hidden_size, config.intermediate_size, numerics=numerics, keep_fp8=keep_fp8)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """The residual stream x [T, hidden] -> [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), step)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekModel(nn.Module):
    """Everything but the head; the checkpoint's `model.` subtree."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, keep_fp8: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=numerics.dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, numerics, layer=layer, keep_fp8=keep_fp8) for layer in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekForCausalLM(nn.Module):
    """The whole model.

    numerics: the arithmetic; see `Numerics`. The pools' formats are the pools' business.
    keep_fp8: hold block-FP8 matrices as stored, with their scales, instead of dequantised.
    attention_form: AUTO outside tests; the forms are equal up to rounding.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        keep_fp8: bool = False,
        attention_form: AttentionForm = AttentionForm.AUTO,
    ) -> None:
        super().__init__()
        quantization = config.quantization_config
        if keep_fp8 and quantization is not None and quantization.weight_block_size != (TILE, TILE):
            tile = quantization.weight_block_size
            raise ValueError(f"weight_block_size {tile}: only tiles of {TILE} x {TILE} are kept in FP8")
        self.config = config
        self.numerics = numerics
        self.attention_form = attention_form
        self.frequencies = rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self.rotary_magnitude = rotary_magnitude(config.rope_scaling)
        self.model = DeepseekModel(config, numerics, keep_fp8=keep_fp8)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=torch.float32)

    def forward(self, input_ids: Tensor, context: ForwardContext, pools: KvPools) -> Tensor:
        """input_ids [T] int64 -> hidden states [T, hidden] after the final norm; the tokens' keys go to the pools."""
        step = self.attention_step(context, pools)
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, step)
        return self.model.norm(x)

    def attention_step(self, context: ForwardContext, pools: KvPools) -> AttentionStep:
        """What every layer of one step shares."""
        return AttentionStep(
            rotary=rotary_table(context.positions, self.frequencies, self.rotary_magnitude),
            kv_slots=context.kv_slots,
            plan=plan_attention(context, config=self.config, form=self.attention_form),
            pools=pools,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] as `forward` returns it -> logits [N, vocab] float32."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return nn.functional.linear(hidden.float(), head.weight.float())
