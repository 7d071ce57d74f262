"""The fused model: what `DeepseekForCausalLM` computes, as it is deployed on GPUs.

Same mathematics, same keys in the same pools, other arithmetic: inputs of linears and index queries are rounded to FP8.
It is made of a plain model that kept its FP8 weights, whose tensors it takes over. It holds no state of requests.
`why_not` says which models it does not take; those run on the plain one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from baleen_kernels.fp8_quant import GROUP

from baleen_worker.model.fused.attention import FusedAttention
from baleen_worker.model.fused.beside import Beside
from baleen_worker.model.fused.experts import FusedMlp, FusedMoe, Returned, UniformRouting
from baleen_worker.model.fused.step import plan_step
from baleen_worker.model.fused.weights import MoeWeights, fuse_layer
from baleen_worker.model.rope import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.cache.storage import PagedPools
    from baleen_worker.model.context import ForwardContext
    from baleen_worker.model.deepseek_v32 import DecoderLayer, DeepseekForCausalLM
    from baleen_worker.model.fused.ops import FusedOps
    from baleen_worker.model.fused.step import FusedStep
    from baleen_worker.model.fused.weights import LayerWeights
    from baleen_worker.model_config import ModelConfig

# What a feed-forward adds to the residual stream, as the next norm takes it; None before the first layer.
Delta: TypeAlias = "Tensor | Returned | None"


def why_not(config: ModelConfig) -> str | None:
    """The reason why a model cannot be computed by the fused ops; None if it can."""
    if config.quantization_config is None:
        return "its weights are not block FP8"
    if not config.has_indexer:
        return "it has no indexer"
    if config.tie_word_embeddings:
        return "its output head is tied to the embedding"
    if config.qk_rope_head_dim != 64 or config.index_head_dim != GROUP:
        return f"the fused ops take rope keys of 64 and index keys of {GROUP} channels"
    if config.q_lora_rank is None:
        return "it has no query latent"
    q_width = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "width of all query heads": q_width,
        "width of all value heads": config.num_attention_heads * config.v_head_dim,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    uneven = next((name for name, width in widths.items() if width % GROUP), None)
    if uneven is not None:
        return f"its {uneven}, {widths[uneven]}, is no multiple of {GROUP}"
    return None


class FusedLayer:
    """Attention and feed-forward; the residual stream is changed in place by the norm before each."""

    def __init__(
        self,
        layer: int,
        weights: LayerWeights,
        config: ModelConfig,
        ops: FusedOps,
        cos_sin: Tensor,
        *,
        dtype: torch.dtype,
        scale_ue8m0: bool,
        uniform: UniformRouting | None,
        beside: Beside,
    ) -> None:
        self._ops, self._eps, self._ue8m0 = ops, config.rms_norm_eps, scale_ue8m0
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm
        self.attention = FusedAttention(
            layer, weights.attention, config, ops, cos_sin, dtype=dtype, scale_ue8m0=scale_ue8m0, beside=beside
        )
        if isinstance(weights.mlp, MoeWeights):
            self.mlp: FusedMlp | FusedMoe = FusedMoe(
                layer, weights.mlp, config, ops, dtype=dtype, scale_ue8m0=scale_ue8m0, uniform=uniform, beside=beside
            )
        else:
            self.mlp = FusedMlp(weights.mlp, ops, dtype=dtype, scale_ue8m0=scale_ue8m0)

    def __call__(self, residual: Tensor, delta: Delta, step: FusedStep, pools: PagedPools) -> Tensor | Returned:
        """residual [T, hidden] += delta, then += attention -> what the feed-forward adds to it."""
        options = {"eps": self._eps, "scale_ue8m0": self._ue8m0}
        y, *rounded = _add_and_norm(self._ops, residual, delta, self._input_norm, **options)
        delta = self.attention(y, (rounded[0], rounded[1]), step, pools)
        y, *rounded = self._ops.norm_quant(residual, delta, self._post_norm, **options)
        return self.mlp(y, (rounded[0], rounded[1]), step)


def _add_and_norm(
    ops: FusedOps, residual: Tensor, delta: Delta, weight: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(delta, Returned):
        return ops.combine_norm(residual, delta.rows, delta.weights, delta.shared, weight, **options)
    return ops.norm_quant(residual, delta, weight, **options)


class FusedModel:
    """Called like `DeepseekForCausalLM`, on pools in bfloat16, packed FP8 or, for tests, float32."""

    def __init__(
        self,
        plain: DeepseekForCausalLM,
        ops: FusedOps,
        *,
        max_positions: int,
        device: torch.device,
        uniform_routing: bool = False,
    ) -> None:
        """`plain` holds FP8 weights and is empty afterwards. No position is `max_positions` or more."""
        config = self.config = plain.config
        reason = why_not(config)
        if reason is not None:
            raise ValueError(f"the fused ops cannot compute this model: {reason}")
        assert config.quantization_config is not None
        dtype = plain.numerics.dtype
        self.ops = ops
        self._embedding = plain.model.embed_tokens.weight
        self._norm, self._norm_eps = plain.model.norm.weight, plain.model.norm.eps
        self._head = plain.lm_head.weight.to(dtype)
        table = rotary_table(torch.arange(max_positions, device=device), plain.frequencies, plain.rotary_magnitude)
        cos_sin = torch.cat([table.cos, table.sin], -1)
        uniform = UniformRouting(config.num_hidden_layers, config.n_routed_experts, device) if uniform_routing else None
        beside = Beside(device)
        del plain.lm_head
        layers = plain.model.layers
        self.layers: list[FusedLayer] = []
        for number in range(config.num_hidden_layers):
            weights = fuse_layer(cast("DecoderLayer", layers[number]), dtype)
            layers[number] = torch.nn.Identity()
            self.layers.append(
                FusedLayer(
                    number,
                    weights,
                    config,
                    ops,
                    cos_sin,
                    dtype=dtype,
                    scale_ue8m0=config.quantization_config.scale_fmt == "ue8m0",
                    uniform=uniform,
                    beside=beside,
                )
            )
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the layer's separate matrices, whose room the next one needs

    def __call__(self, input_ids: Tensor, context: ForwardContext, pools: PagedPools) -> Tensor:
        """input_ids [T] int64 -> hidden states [T, hidden] after the final norm; the tokens' keys go to the pools."""
        step = plan_step(context, self.config, self.ops)
        if step.order is None:
            return self.run(input_ids, step, pools)
        return self.run(input_ids[step.order], step, pools)[step.back]

    def run(self, input_ids: Tensor, step: FusedStep, pools: PagedPools) -> Tensor:
        """The same for a step that is planned, tokens in its order."""
        residual = self._embedding.index_select(0, input_ids)
        delta: Delta = None
        for layer in self.layers:
            delta = layer(residual, delta, step, pools)
        return _add_and_norm(self.ops, residual, delta, self._norm, eps=self._norm_eps, scale_ue8m0=True)[0]

    def schedule_of(self, lengths: Tensor) -> Tensor | None:
        """See `FusedOps.schedule_of`."""
        return self.ops.schedule_of(lengths)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [N, hidden] as a call returns it -> logits [N, vocab] float32, in `out` if that is given."""
        return self.ops.wide_gemm(hidden, self._head, out)
