"""Byte layouts of a cached latent and its rope key, one token and one layer.

FP8: C bytes of e4m3 latent, then one float32 scale per 128 latent channels, then R bfloat16 rope channels, unrounded
otherwise; 512 + 16 + 128 = 656 bytes for the released model. Groups and scales as in `fp8_quant`: the floor under a
group's maximum keeps all-zero groups finite. Scales are powers of two with `scale_ue8m0`, and packing what was
unpacked then changes nothing; readers take any scale.
Plain: C latent channels then R rope channels in one dtype; 1152 bytes in bfloat16 for the released model.

pack_latent_fp8: kv_latent [T, C], k_rope [T, R] -> uint8 [T, fp8_latent_bytes(C, R)].
unpack_latent_fp8: the inverse -> (kv_latent [T, C], k_rope [T, R]) in the given dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import fp8_quant
from baleen_kernels.registry import Op


def fp8_latent_bytes(latent: int, rope: int) -> int:
    """Bytes per token and layer of the FP8 layout; ValueError if the groups do not fit the latent."""
    if latent > fp8_quant.GROUP and latent % fp8_quant.GROUP:
        raise ValueError(f"FP8 latents need a multiple of {fp8_quant.GROUP} channels (or fewer), got {latent}")
    return latent + 4 * _num_groups(latent) + 2 * rope


def _num_groups(latent: int) -> int:
    return max(1, latent // fp8_quant.GROUP)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    latent: int
    rope: int
    scale_ue8m0: bool
    zeros: bool = False


CASES = (
    Case("released", 3, 512, 64, True),
    Case("released_plain_scale", 3, 512, 64, False),
    Case("one_group", 4, 128, 16, True),
    Case("narrow", 4, 64, 16, True),
    Case("zeros", 2, 256, 8, True, zeros=True),
    Case("zeros_plain_scale", 2, 256, 8, False, zeros=True),
    Case("no_tokens", 0, 128, 16, True),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random latents; `zeros` clears the last group."""
    g = torch.Generator().manual_seed(0)
    kv_latent = torch.randn(case.num_tokens, case.latent, generator=g)
    if case.zeros:
        kv_latent[:, -128:] = 0
    k_rope = torch.randn(case.num_tokens, case.rope, generator=g)
    return {"kv_latent": kv_latent, "k_rope": k_rope, "scale_ue8m0": case.scale_ue8m0}


def reference(kv_latent: Tensor, k_rope: Tensor, *, scale_ue8m0: bool) -> Tensor:
    """The contract, byte range by byte range."""
    (num_tokens, latent), rope = kv_latent.shape, k_rope.shape[1]
    num_groups = _num_groups(latent)
    out = torch.empty(num_tokens, fp8_latent_bytes(latent, rope), dtype=torch.uint8)
    for token in range(num_tokens):
        values, scales = fp8_quant.reference(kv_latent[token], scale_ue8m0=scale_ue8m0)
        out[token, :latent] = values.view(torch.uint8)
        out[token, latent : latent + 4 * num_groups] = scales.view(torch.uint8)
        out[token, latent + 4 * num_groups :] = k_rope[token].to(torch.bfloat16).view(torch.uint8)
    return out


OP = Op("latent_pack", reference, CASES, make_inputs, atol=0, rtol=0)


@OP.backend("torch")
def _torch(kv_latent: Tensor, k_rope: Tensor, *, scale_ue8m0: bool) -> Tensor:
    values, scales = fp8_quant.quantize_groups(kv_latent, scale_ue8m0=scale_ue8m0)
    rope = k_rope.to(torch.bfloat16).contiguous()
    return torch.cat([part.contiguous().view(torch.uint8) for part in (values, scales, rope)], -1)


def pack_latent_fp8(kv_latent: Tensor, k_rope: Tensor, *, scale_ue8m0: bool, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(kv_latent, k_rope, scale_ue8m0=scale_ue8m0)


def unpack_latent_fp8(packed: Tensor, *, latent: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See the module docstring. ValueError if the row width is not that of the sizes."""
    num_bytes = fp8_latent_bytes(latent, rope)
    if packed.shape[-1] != num_bytes:
        raise ValueError(f"FP8 latents of {latent} + {rope} channels take {num_bytes} bytes, got {packed.shape[-1]}")
    values, scales, k_rope = packed.split([latent, 4 * _num_groups(latent), 2 * rope], -1)
    kv_latent = fp8_quant.dequantize_groups(
        values.contiguous().view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)
    )
    return kv_latent.to(dtype), k_rope.contiguous().view(torch.bfloat16).to(dtype)


def pack_latent_plain(kv_latent: Tensor, k_rope: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[T, C] and [T, R] -> [T, C + R] of the dtype."""
    return torch.cat([kv_latent, k_rope], -1).to(dtype)


def unpack_latent_plain(packed: Tensor, *, latent: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_latent_plain`, in the dtype asked for."""
    kv_latent, k_rope = packed.to(dtype).split([latent, rope], -1)
    return kv_latent, k_rope
