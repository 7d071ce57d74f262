"""An independent float32 reference of DeepSeek-V3.2, for checking the product: one sequence at a time, no cache.

Written from the paper and the released checkpoint layout, sharing no code with the product. `ReferenceModel.forward`
returns everything worth comparing: logits, residual stream, index scores, selections, router picks.

Shapes: T tokens, H heads. Weights are a checkpoint's tensors by name; block-FP8 ones are dequantised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FP8_MAX = 448.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) + bias


def yarn_frequencies(dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Frequency of each rotary pair; YaRN blends f (fast pairs) with f / factor (slow pairs)."""
    f = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not scaling:
        return f

    def pair_index(rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_index(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_index(scaling["beta_slow"])), dim - 1)
    slow = ((torch.arange(dim // 2) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return f * (1 - slow) + f / scaling["factor"] * slow


def mscale(factor: float, power: float) -> float:
    return 0.1 * power * math.log(factor) + 1.0


def rotary_magnitude(scaling: dict[str, Any] | None) -> float:
    """Factor on cos and sin: 1 unless mscale and mscale_all_dim differ."""
    if not scaling:
        return 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["factor"], scaling["mscale"]) / mscale(scaling["factor"], scaling["mscale_all_dim"])
    return mscale(scaling["factor"], 1.0)


def attention_scale(config: dict[str, Any]) -> float:
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("mscale_all_dim"):
        scale *= mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale


def rotate(x: Tensor, angle: Tensor, magnitude: float, *, rope_interleaved: bool) -> Tensor:
    """x [T, heads, d] by angle [T, d/2]: pairs (2i, 2i+1) if interleaved, else (i, i + d/2)."""
    cos, sin = magnitude * angle.cos()[:, None], magnitude * angle.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if rope_interleaved else x.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    return torch.stack([a, b], -1).flatten(-2) if rope_interleaved else torch.cat([a, b], -1)


def hadamard(x: Tensor) -> Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < x.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x @ h * x.shape[-1] ** -0.5


def round_fp8(x: Tensor) -> Tensor:
    """Quantise to e4m3 with one power-of-two scale per 128 channels, and back."""
    groups = x.unflatten(-1, (-1, min(128, x.shape[-1])))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / FP8_MAX)
    mantissa, exponent = torch.frexp(scale)
    scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    values = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (values * scale).flatten(-2)


def dequantize(weight: Tensor, scale_inv: Tensor) -> Tensor:
    scale = scale_inv.float().repeat_interleave(128, 0)[: weight.shape[0]]
    return weight.float() * scale.repeat_interleave(128, 1)[:, : weight.shape[1]]


@dataclass
class LayerTrace:
    """What one layer computed: index scores [T, T] before the mask, selection [T, T], router picks [T, k]."""

    index_scores: Tensor | None = None
    allowed: Tensor = field(default_factory=lambda: torch.empty(0))
    attn_out: Tensor = field(default_factory=lambda: torch.empty(0))
    expert_ids: Tensor | None = None
    expert_weights: Tensor | None = None


@dataclass
class Trace:
    """hidden: the residual stream before layer 0 .. L; logits [T, V]."""

    logits: Tensor
    hidden: list[Tensor]
    layers: list[LayerTrace]


class ReferenceModel:
    """`deployed` rounds index queries and keys (after Hadamard), latents and inputs of FP8 linears to FP8."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], *, deployed: bool = False) -> None:
        self.config = config
        self.deployed = deployed
        self.fp8_names = {name.removesuffix("_scale_inv") for name in weights if name.endswith("_scale_inv")}
        self.weights = {
            name: dequantize(tensor, weights[name + "_scale_inv"]) if name in self.fp8_names else tensor.float()
            for name, tensor in weights.items()
            if not name.endswith("_scale_inv")
        }
        self.eps = config["rms_norm_eps"]
        self.frequencies = yarn_frequencies(
            config["qk_rope_head_dim"], config["rope_theta"], config.get("rope_scaling")
        )
        self.magnitude = rotary_magnitude(config.get("rope_scaling"))
        self.has_indexer = "index_topk" in config
        self.pattern: str = config.get("index_topk_pattern") or ""

    def linear(self, x: Tensor, name: str) -> Tensor:
        if self.deployed and name + ".weight" in self.fp8_names:
            x = round_fp8(x)
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        # The norms of the two latents have an eps of their own.
        eps = 1e-6 if name.endswith("_a_layernorm") else self.eps
        return rms_norm(x, self.weights[name + ".weight"], eps)

    def index_scores(self, prefix: str, x: Tensor, q_latent: Tensor, angle: Tensor) -> Tensor:
        """x [T, hidden], q_latent [T, q_lora] -> scores [T, T], before the causal mask."""
        heads, width = self.config["index_n_heads"], self.config["index_head_dim"]
        rope_dim = self.config["qk_rope_head_dim"]
        q = self.linear(q_latent, prefix + "wq_b").view(-1, heads, width)
        norm = self.weights[prefix + "k_norm.weight"], self.weights[prefix + "k_norm.bias"]
        k = layer_norm(self.linear(x, prefix + "wk"), *norm, 1e-6)[:, None]

        def finish(t: Tensor) -> Tensor:
            t = torch.cat(
                [rotate(t[..., :rope_dim], angle, self.magnitude, rope_interleaved=False), t[..., rope_dim:]], -1
            )
            return round_fp8(hadamard(t)) if self.deployed else t

        q, k = finish(q), finish(k)[:, 0]
        weights = self.linear(x, prefix + "weights_proj") * heads**-0.5 * width**-0.5
        return torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, k).relu())

    def select(self, scores: Tensor) -> Tensor:
        """[T, T] scores -> bool selection: causal top-k, the lower position first among equals."""
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        order = scores.masked_fill(future, -math.inf).sort(dim=-1, descending=True, stable=True).indices
        picks = order[:, : self.config["index_topk"]]
        return torch.zeros_like(future).scatter_(1, picks, True) & ~future

    def attention(self, prefix: str, x: Tensor, trace: LayerTrace, reused: Tensor | None = None) -> Tensor:
        c = self.config
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        angle = torch.arange(len(x))[:, None].float() * self.frequencies
        if c.get("q_lora_rank") is None:
            q_latent, q = None, self.linear(x, prefix + "q_proj")
        else:
            q_latent = self.norm(self.linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm")
            q = self.linear(q_latent, prefix + "q_b_proj")
        q_nope, q_rope = q.view(len(x), heads, -1).split([nope, rope], -1)
        q_rope = rotate(q_rope, angle, self.magnitude, rope_interleaved=True)
        latent, k_rope = self.linear(x, prefix + "kv_a_proj_with_mqa").split([c["kv_lora_rank"], rope], -1)
        latent = self.norm(latent, prefix + "kv_a_layernorm")
        latent = round_fp8(latent) if self.deployed else latent
        k_rope = rotate(k_rope[:, None], angle, self.magnitude, rope_interleaved=True)[:, 0]
        trace.allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if self.has_indexer and q_latent is not None:
            if reused is None:
                trace.index_scores = self.index_scores(prefix + "indexer.", x, q_latent, angle)
                trace.allowed = self.select(trace.index_scores)
            else:
                trace.allowed = reused
        k_nope, v = self.linear(latent, prefix + "kv_b_proj").view(len(x), heads, -1).split([nope, c["v_head_dim"]], -1)
        scores = torch.einsum("thd,nhd->thn", q_nope, k_nope) + torch.einsum("thd,nd->thn", q_rope, k_rope)
        scores = (scores * attention_scale(c)).masked_fill(~trace.allowed[:, None], -math.inf)
        trace.attn_out = self.linear(torch.einsum("thn,nhd->thd", scores.softmax(-1), v).flatten(1), prefix + "o_proj")
        return trace.attn_out

    def swiglu(self, prefix: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(x, prefix + "gate_proj"))
        return self.linear(gate * self.linear(x, prefix + "up_proj"), prefix + "down_proj")

    def route(self, prefix: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> expert ids [T, k] and weights [T, k]; lower ids first among equals."""
        c, groups = self.config, self.config["n_group"]
        scores = torch.sigmoid(self.linear(x, prefix + "gate"))
        biased = (scores + self.weights[prefix + "gate.e_score_correction_bias"]).view(len(x), groups, -1)
        group_scores = biased.topk(2, -1).values.sum(-1)
        kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : c["topk_group"]]
        keep = torch.zeros(len(x), groups, dtype=torch.bool).scatter_(1, kept, True)
        choice = biased.masked_fill(~keep[..., None], -math.inf).flatten(1)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : c["num_experts_per_tok"]]
        weights = scores.gather(1, ids)
        if c["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * c["routed_scaling_factor"]

    def moe(self, prefix: str, x: Tensor, trace: LayerTrace) -> Tensor:
        trace.expert_ids, trace.expert_weights = self.route(prefix, x)
        y = self.swiglu(prefix + "shared_experts.", x)
        for expert in trace.expert_ids.unique().tolist():
            token, column = (trace.expert_ids == expert).nonzero(as_tuple=True)
            result = self.swiglu(f"{prefix}experts.{expert}.", x[token])
            y = y.index_add(0, token, trace.expert_weights[token, column, None] * result)
        return y

    def layer(self, number: int, x: Tensor, trace: LayerTrace, reused: Tensor | None = None) -> Tensor:
        """`reused`: the selection of the layer before, for a layer that makes none of its own (IndexCache)."""
        prefix = f"model.layers.{number}."
        x = x + self.attention(prefix + "self_attn.", self.norm(x, prefix + "input_layernorm"), trace, reused)
        h = self.norm(x, prefix + "post_attention_layernorm")
        if number >= self.config["first_k_dense_replace"]:
            return x + self.moe(prefix + "mlp.", h, trace)
        return x + self.swiglu(prefix + "mlp.", h)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Trace:
        """ids [T], positions from 0."""
        x = self.weights["model.embed_tokens.weight"][ids]
        hidden, layers = [x], []
        for number in range(self.config["num_hidden_layers"]):
            layers.append(LayerTrace())
            reused = layers[-2].allowed if "S" in self.pattern[number : number + 1] else None
            x = self.layer(number, x, layers[-1], reused)
            hidden.append(x)
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return Trace(self.linear(self.norm(x, "model.norm"), head), hidden, layers)
