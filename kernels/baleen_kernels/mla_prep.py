"""Everything between the latent projections of attention and their use, in one step.

From one row of the fused projection, x[t] = (query latent [A] | key-value latent [C] | rope key [R]):
  q = RMS norm of the query latent, rounded to the dtype of x, then to FP8 in groups of 128: values and scales;
  the key-value latent is normed, the rope key rotated (interleaved pairs), both rounded to the dtype of x, and stored
at
  slots[t] of the latent pool: plain, or packed in FP8 as in `latent_pack`, by the dtype of the pool.

x [T, A + C + R], bfloat16 or float32, rows at any distance; q_weight [A], kv_weight [C] float32; cos_sin [P, R]
float32, cosines then sines of each position; positions, slots [T] int64; latents [S, C + R] of x's dtype, or [S,
bytes] uint8, changed in place -> q_values [T, A] float8_e4m3fn, q_scales [T, A / 128] float32. Norms with an eps of
1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant, latent_pack, rms_norm, rope
from baleen_kernels.machine import TRITON
from baleen_kernels.registry import Op

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    packed: bool
    dtype: torch.dtype = torch.bfloat16
    query: int = 1536
    latent: int = 512
    rope: int = 64
    scale_ue8m0: bool = True


CASES = (
    Case("one_token", 1, packed=False),
    Case("plain", 9, packed=False),
    Case("packed", 9, packed=True),
    Case("packed_plain_scale", 3, packed=True, scale_ue8m0=False),
    Case("float32", 3, packed=False, dtype=torch.float32, query=256, latent=128, rope=16),
    Case("no_tokens", 0, packed=True),
    Case("many_tokens", 40, packed=False),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random projections, with columns of others beyond them; slots without order in a pool of old bytes."""
    g = torch.Generator().manual_seed(case.num_tokens)
    positions, num_slots = 300, case.num_tokens + 20
    angle = 10 * torch.randn(positions, case.rope // 2, generator=g)
    width = case.query + case.latent + case.rope
    if case.packed:
        row = latent_pack.fp8_latent_bytes(case.latent, case.rope)
        latents = torch.randint(0, 256, (num_slots, row), generator=g, dtype=torch.uint8)
    else:
        latents = torch.randn(num_slots, case.latent + case.rope, generator=g).to(case.dtype)
    return {
        "x": (2 * torch.randn(case.num_tokens, width + 192, generator=g)).to(case.dtype)[:, :width],
        "q_weight": 1 + 0.2 * torch.randn(case.query, generator=g),
        "kv_weight": 1 + 0.2 * torch.randn(case.latent, generator=g),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], -1),
        "positions": torch.randint(0, positions, (case.num_tokens,), generator=g),
        "slots": torch.randperm(num_slots, generator=g)[: case.num_tokens],
        "latents": latents,
        "scale_ue8m0": case.scale_ue8m0,
    }


def reference(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """The contract, through those of its parts."""
    q, kv_latent, k_rope = x.split([q_weight.shape[0], kv_weight.shape[0], cos_sin.shape[1]], -1)
    cos, sin = cos_sin[positions].chunk(2, -1)
    kv_latent = rms_norm.reference(kv_latent, kv_weight, eps=NORM_EPS)
    k_rope = rope.reference(k_rope[:, None], cos, sin, rope_interleaved=True)[:, 0]
    if latents.dtype == torch.uint8:
        latents[slots] = latent_pack.reference(kv_latent.float(), k_rope.float(), scale_ue8m0=scale_ue8m0)
    else:
        latents[slots] = torch.cat([kv_latent, k_rope], -1).to(latents.dtype)
    return fp8_quant.reference(rms_norm.reference(q, q_weight, eps=NORM_EPS), scale_ue8m0=scale_ue8m0)


OP = Op("mla_prep", reference, CASES, make_inputs, byte_flips=0.02)


@OP.backend("torch")
def _torch(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    q, kv_latent, k_rope = x.split([q_weight.shape[0], kv_weight.shape[0], cos_sin.shape[1]], -1)
    cos, sin = cos_sin[positions].chunk(2, -1)
    kv_latent = rms_norm.rms_norm(kv_latent, kv_weight, eps=NORM_EPS)
    k_rope = rope.rope(k_rope[:, None], cos, sin, rope_interleaved=True)[:, 0]
    if latents.dtype == torch.uint8:
        latents[slots] = latent_pack.pack_latent_fp8(kv_latent, k_rope, scale_ue8m0=scale_ue8m0)
    else:
        latents[slots] = latent_pack.pack_latent_plain(kv_latent, k_rope, dtype=latents.dtype)
    q = rms_norm.rms_norm(q, q_weight, eps=NORM_EPS)
    return fp8_quant.quantize_groups(q, scale_ue8m0=scale_ue8m0)


def _rejects_triton(x: Tensor, q_weight: Tensor, kv_weight: Tensor, cos_sin: Tensor, **_: Any) -> str | None:
    sizes = kv_weight.shape[0], cos_sin.shape[1]
    if any(size & (size - 1) for size in sizes) or sizes[0] % fp8_quant.GROUP or q_weight.shape[0] % fp8_quant.GROUP:
        return f"it takes powers of two, not a latent of {sizes[0]} and a rope key of {sizes[1]} channels"
    return None if x.stride(1) == 1 else "the channels of a token must lie next to each other"


@OP.backend("triton", needs=TRITON, rejects=_rejects_triton)
def _triton(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    scale_ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    from baleen_kernels.own import mla_prep as own

    inputs = x, q_weight, kv_weight, cos_sin, positions, slots, latents
    return own.prepare(*inputs, eps=NORM_EPS, scale_ue8m0=scale_ue8m0)


def mla_prep(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    scale_ue8m0: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(x, q_weight, kv_weight, cos_sin, positions, slots, latents, scale_ue8m0=scale_ue8m0)
