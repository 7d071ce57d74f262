"""Weights of the fused model, made of those of the plain one: matrices that share an input are one matrix.

Matrices stay in block FP8. What is not block FP8 in a checkpoint (router, head weights of the indexer, output head)
is held in the model's dtype, and the two halves of kv_b_proj that the absorbed form multiplies once a step are held in
it as well: they are products with activations of 128 and 512 channels a head, which no FP8 kernel takes.

`fuse_layer` takes a layer's tensors over one by one, so that memory never holds more than one expert twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from baleen_kernels.fp8_quant import TILE
from torch import Tensor, nn

from baleen_worker.model.linear import BlockLinear
from baleen_worker.model.moe import Mlp, MoE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baleen_worker.model.attention import Attention
    from baleen_worker.model.deepseek_v32 import DecoderLayer


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """values [..., N, K] float8_e4m3fn, scales [..., ceil(N / 128), K / 128] float32."""

    values: Tensor
    scales: Tensor

    def box(self, index: int | slice) -> Fp8Matrix:
        """One expert's of all experts' matrices, or some."""
        return Fp8Matrix(self.values[index], self.scales[index])

    def rows(self, end: int) -> Fp8Matrix:
        """The first `end` rows, whole tiles."""
        assert end % TILE == 0
        return Fp8Matrix(self.values[:end], self.scales[: end // TILE])


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """head_weights [J, hidden]; norm_weight, norm_bias [D]."""

    head_weights: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """in_proj: rows (index key D, if the layer has an indexer | query latent A | key-value latent C | rope key R).

    q_proj: rows (heads H (N + R) | index heads J D, if so). up_k [H, N, C], up_v [H, C, V].
    """

    in_proj: Fp8Matrix
    q_norm: Tensor
    kv_norm: Tensor
    q_proj: Fp8Matrix
    up_k: Tensor
    up_v: Tensor
    o_proj: Fp8Matrix
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up [2 I, hidden], gate first; down [hidden, I]."""

    gate_up: Fp8Matrix
    down: Fp8Matrix


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router [E, hidden], bias [E] float32; gate_up [E, 2 I, hidden], down [E, hidden, I].

    listed: the same with the shared expert, if that is as wide as the others, as expert E; all are views of one memory.
    """

    router: Tensor
    bias: Tensor
    gate_up: Fp8Matrix
    down: Fp8Matrix
    shared: MlpWeights
    listed: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: MlpWeights | MoeWeights


def fuse_layer(layer: DecoderLayer, dtype: torch.dtype) -> LayerWeights:
    """The layer's weights. Its modules are empty afterwards."""
    attention = _attention(layer.self_attn, dtype)
    mlp = _moe(layer.mlp, dtype) if isinstance(layer.mlp, MoE) else _mlp(cast("Mlp", layer.mlp))
    return LayerWeights(layer.input_layernorm.weight, attention, layer.post_attention_layernorm.weight, mlp)


def _attention(module: Attention, dtype: torch.dtype) -> AttentionWeights:
    inputs, queries = [module.q_a_proj, module.kv_a_proj_with_mqa], [module.q_b_proj]
    indexer = None
    if module.indexer is not None:
        inputs.insert(0, module.indexer.wk)
        queries.append(module.indexer.wq_b)
        norm = module.indexer.k_norm
        indexer = IndexerWeights(module.indexer.weights_proj.weight.to(dtype), norm.weight, norm.bias)
    up = module.kv_b_proj.plain_weight(dtype).unflatten(0, (module.num_heads, -1))  # [H, N + V, C]
    up_k, up_v = up.split([module.nope_dim, module.value_dim], 1)
    return AttentionWeights(
        in_proj=_stack(inputs),
        q_norm=module.q_a_layernorm.weight,
        kv_norm=module.kv_a_layernorm.weight,
        q_proj=_stack(queries),
        up_k=up_k.contiguous(),
        up_v=up_v.transpose(1, 2).contiguous(),
        o_proj=_stack([module.o_proj]),
        indexer=indexer,
    )


def _mlp(module: Mlp) -> MlpWeights:
    return MlpWeights(_stack([module.gate_proj, module.up_proj]), _stack([module.down_proj]))


def _moe(module: MoE, dtype: torch.dtype) -> MoeWeights:
    num_experts = len(module.experts)
    shared = _mlp(cast("Mlp", module.shared_experts))
    listed: MlpWeights | None = None
    gate_up: Fp8Matrix | None = None
    down: Fp8Matrix | None = None
    for e in range(num_experts):
        expert = _mlp(cast("Mlp", module.experts[e]))
        module.experts[e] = nn.Identity()
        if gate_up is None or down is None:
            lists_shared = shared.down.values.shape == expert.down.values.shape
            room = num_experts + lists_shared
            gate_up, down = (_room_for(room, matrix) for matrix in (expert.gate_up, expert.down))
            if lists_shared:
                listed = MlpWeights(gate_up, down)
        _put(expert, gate_up, down, e)
    assert gate_up is not None
    assert down is not None
    if listed is not None:
        _put(shared, gate_up, down, num_experts)
        shared = MlpWeights(gate_up.box(num_experts), down.box(num_experts))
    routed = slice(num_experts)
    bias = module.gate.e_score_correction_bias
    router = module.gate.weight.to(dtype)
    return MoeWeights(router, bias, gate_up.box(routed), down.box(routed), shared, listed)


def _put(expert: MlpWeights, gate_up: Fp8Matrix, down: Fp8Matrix, index: int) -> None:
    for boxes, matrix in ((gate_up, expert.gate_up), (down, expert.down)):
        boxes.values[index] = matrix.values
        boxes.scales[index] = matrix.scales


def _room_for(count: int, matrix: Fp8Matrix) -> Fp8Matrix:
    return Fp8Matrix(
        matrix.values.new_empty(count, *matrix.values.shape), matrix.scales.new_empty(count, *matrix.scales.shape)
    )


def _stack(linears: Sequence[BlockLinear]) -> Fp8Matrix:
    """The matrices one below the other; the parameters are taken from their modules."""
    assert all(linear.weight.shape[0] % TILE == 0 for linear in linears[:-1])
    parts: list[Any] = []
    for linear in linears:
        parts.append((linear.weight.data, linear.weight_scale_inv.data))
        del linear.weight, linear.weight_scale_inv
    if len(parts) == 1:
        return Fp8Matrix(*parts[0])
    values = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(torch.float8_e4m3fn)
    return Fp8Matrix(values, torch.cat([scales for _, scales in parts]))
