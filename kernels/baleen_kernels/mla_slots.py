"""Absorbed latent attention over selected slots of the pool: `mla_sparse` as deployed, reading the pool in place.

q [T, H, C + R] bfloat16 or float32, latent part first; latents, the pool: [S, C + R] of its dtype, or packed FP8
[S, bytes] uint8 as in `latent_pack`; slots [T, K] int32, -1 for none, in any place -> [T, H, C] of q's dtype. A token
that selects nothing gets zeros. Scores, softmax and sums in float32. R is 64; C is 512 for the libraries, which take
bfloat16 and any number of heads up to 128, whose time they round up to 64 or 128. Our own kernel takes any number of
heads and slots, and rounds its time up to 64 heads on a Hopper GPU.

Prefill and decode are the same function; backends differ in the pools they read and the sizes they like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels import compact_slots, latent_pack, mla_sparse
from baleen_kernels.machine import ANY_TRITON, HOPPER, HOPPER_OR_BLACKWELL, Needs
from baleen_kernels.registry import Op

LATENT, ROPE = 512, 64
_HEADS_AT_A_TIME, _MOST_HEADS = 64, 128
_MOST_PARTS = 8
FLASH_MLA = Needs(archs=HOPPER_OR_BLACKWELL, arch_note="a Hopper or Blackwell GPU", packages=("flash_mla",))
SPLIT_FLASH_MLA = Needs(
    archs=HOPPER_OR_BLACKWELL, arch_note="a Hopper or Blackwell GPU", packages=("flash_mla", "triton")
)
PAGED_FA3 = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("vllm_flash_attn", "triton"))
TILELANG = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("tilelang", "triton"), tools=("nvcc",))


@dataclass(frozen=True, slots=True)
class Case:
    """`poison`: what no token selects is NaN, slot 0 among it."""

    name: str
    num_tokens: int
    num_heads: int
    topk: int
    packed: bool
    padding: str = "some"
    latent: int = LATENT
    dtype: torch.dtype = torch.bfloat16
    poison: bool = False


CASES = (
    Case("one_token", 1, 128, 2048, packed=False, padding="none"),
    Case("released", 3, 128, 2048, packed=False),
    Case("released_packed", 3, 128, 2048, packed=True),
    Case("short_context", 3, 128, 2048, packed=False, padding="tail"),
    Case("half_the_heads", 5, 64, 256, packed=False),
    Case("half_the_heads_packed", 2, 64, 2048, packed=True, padding="none"),
    Case("few_heads", 3, 8, 256, packed=False),
    Case("few_heads_packed", 3, 8, 256, packed=True),
    Case("narrow_latent", 4, 4, 64, packed=False, latent=128, dtype=torch.float32),
    Case("nothing_selected", 2, 64, 2048, packed=True, padding="all"),
    Case("nothing_selected_plain", 2, 64, 128, packed=False, padding="all"),
    Case("not_finite_elsewhere", 4, 16, 256, packed=False, poison=True),
    Case("not_finite_elsewhere_packed", 4, 16, 256, packed=True, poison=True),
    Case("odd_numbers", 3, 17, 100, packed=False),
    Case("odd_numbers_packed", 3, 65, 100, packed=True),
    Case("one_slot", 2, 1, 1, packed=False, padding="none"),
    Case("no_tokens", 0, 16, 128, packed=False),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random queries over a pool; picks without repetition, some replaced by -1 in any column."""
    g = torch.Generator().manual_seed(len(case.name))
    num_slots = 64 * 40
    latent, rope = (torch.randn(num_slots, width, generator=g) for width in (case.latent, ROPE))
    if case.packed:
        latents = latent_pack.pack_latent_fp8(latent, rope, scale_ue8m0=True)
    else:
        latents = latent_pack.pack_latent_plain(latent, rope, dtype=case.dtype)
    slots = torch.rand(case.num_tokens, num_slots, generator=g).argsort(-1)[:, : case.topk].int()
    if case.padding == "tail":
        slots[:, case.topk // 10 :] = -1
    elif case.padding != "none":
        threshold = 2.0 if case.padding == "all" else 0.3
        slots = slots.masked_fill(torch.rand(slots.shape, generator=g) < threshold, -1)
    if case.poison:
        slots = slots.masked_fill(slots == 0, -1)
        unused = torch.ones(num_slots, dtype=torch.bool)
        unused[slots[slots >= 0].long()] = False
        latents[unused] = 0x7F if case.packed else torch.nan  # as an e4m3 number and as half of a scale, too, NaN
    return {
        "q": torch.randn(case.num_tokens, case.num_heads, case.latent + ROPE, generator=g).to(case.dtype),
        "latents": latents,
        "slots": slots,
        "softmax_scale": 0.07,
    }


def reference(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    """The contract through `mla_sparse`."""
    return mla_sparse.reference(*_parts(q, latents), slots, softmax_scale=softmax_scale).to(q.dtype)


def _parts(q: Tensor, latents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    unpack = latent_pack.unpack_latent_fp8 if latents.dtype == torch.uint8 else latent_pack.unpack_latent_plain
    latent = q.shape[2] - ROPE
    q_latent, q_rope = q.float().split([latent, ROPE], -1)
    return q_latent, q_rope, *unpack(latents, latent=latent, rope=ROPE, dtype=torch.float32)


OP = Op("mla_slots", reference, CASES, make_inputs)


@OP.backend("torch")
def _torch(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    return mla_sparse.mla_sparse(*_parts(q, latents), slots, softmax_scale=softmax_scale).to(q.dtype)


def _rejects_flashmla(q: Tensor, **_: Any) -> str | None:
    if q.dtype != torch.bfloat16:
        return f"it takes bfloat16 queries, not {q.dtype}"
    if q.shape[1] > _MOST_HEADS or q.shape[2] != LATENT + ROPE:
        return f"it takes up to {_MOST_HEADS} heads of {LATENT + ROPE} channels, not {tuple(q.shape[1:])}"
    return None


def with_whole_tiles(q: Tensor) -> Tensor:
    """q with as many heads as the libraries compute at a time: heads of zeros cost what real ones do."""
    missing = -q.shape[1] % _HEADS_AT_A_TIME
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q


def _rejects_sparse(q: Tensor, latents: Tensor, slots: Tensor, **_: Any) -> str | None:
    if latents.dtype != torch.bfloat16:
        return "it reads bfloat16 pools"
    if slots.shape[1] % 128:
        return f"it selects a multiple of 128 slots, not {slots.shape[1]}"
    return _rejects_flashmla(q)


def _rejects_kv(q: Tensor, latents: Tensor, slots: Tensor, **_: Any) -> str | None:
    if latents.dtype != torch.uint8:
        return "it reads packed FP8 pools"
    if slots.shape[1] % 64 or latents.shape[0] % 64:
        return "it selects a multiple of 64 slots of a pool of whole pages"
    return _rejects_flashmla(q)


def parts_of(num_tokens: int, num_heads: int, topk: int, *, num_blocks: int = 132) -> int:
    """Into how many parts the selection of each token is cut, so that few tokens keep a device busy: a power of two up
    to 8, parts of whole 128 slots.

    A block of threads takes 64 heads of one part. `num_blocks`: one for each of an H200's multiprocessors.
    """
    parts, blocks = 1, num_tokens * -(-num_heads // _HEADS_AT_A_TIME)
    while parts < _MOST_PARTS and 2 * parts * blocks <= num_blocks and topk % (256 * parts) == 0:
        parts *= 2
    return parts


@OP.backend("flashmla_sparse", needs=SPLIT_FLASH_MLA, rejects=_rejects_sparse)
def _flashmla_sparse(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    from flash_mla import flash_mla_sparse_fwd  # pyright: ignore[reportMissingImports]

    from baleen_kernels.own import merge_parts as own

    padded, num_heads = with_whole_tiles(q), q.shape[1]
    if len(q) == 0:  # the library fails on it
        return q.new_empty(0, num_heads, LATENT)
    num_parts = parts_of(padded.shape[0], padded.shape[1], slots.shape[1])
    # The current kernels of this package are for later GPUs; its legacy side has Hopper and this format.
    options = {"use_legacy": True, "return_log2_lse": None if num_parts > 1 else False}
    if num_parts == 1:
        out, *_ = flash_mla_sparse_fwd(padded, latents[:, None], slots[:, None], softmax_scale, **options)
        return out[:, :num_heads]
    # Each part of a selection as a query of its own, put together afterwards.
    queries = own.repeat(padded, num_parts)
    parts, _, lse = flash_mla_sparse_fwd(
        queries, latents[:, None], slots.reshape(len(queries), 1, -1), softmax_scale, **options
    )
    by_part = (len(q), num_parts)
    return own.merge(parts.unflatten(0, by_part), lse.unflatten(0, by_part))[:, :num_heads]


@OP.backend("flashmla_kv", needs=FLASH_MLA, rejects=_rejects_kv)
def _flashmla_kv(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    return _call_flashmla_kv(q, latents, slots, softmax_scale, flashmla_plan())


def portable_rejects(q: Tensor, latents: Tensor) -> str | None:
    """What our portable kernel does not take of queries and pools, whatever selects in them."""
    packed, latent = latents.dtype == torch.uint8, q.shape[2] - ROPE
    if latents.dtype != q.dtype and not (packed and q.dtype == torch.bfloat16):
        return f"it takes queries of the pool's dtype, bfloat16 for packed pools, not {q.dtype} for {latents.dtype}"
    if latent < 16 or latent & (latent - 1) or (packed and latent % 128):
        return f"it takes latents of a power of two of channels, 128 or more of them packed, not {latent}"
    return None if latents.is_contiguous() else "it takes pools that are contiguous"


def _rejects_triton(q: Tensor, latents: Tensor, slots: Tensor, **_: Any) -> str | None:
    if slots.dtype != torch.int32:
        return f"it takes slots as int32, not {slots.dtype}"
    return portable_rejects(q, latents)


@OP.backend("triton", needs=ANY_TRITON, rejects=_rejects_triton)
def _triton(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    from baleen_kernels.own import mla_slots

    own = mla_slots
    if mla_slots.on_hopper() and (q.dtype, q.shape[2]) == (torch.bfloat16, LATENT + ROPE):
        from baleen_kernels.own import mla_slots_hopper as own
    return _in_parts(own.attend, q, latents, slots, softmax_scale)


def _rejects_tilelang(q: Tensor, latents: Tensor, slots: Tensor, **_: Any) -> str | None:
    if latents.dtype != torch.bfloat16 or q.dtype != torch.bfloat16:
        return f"it takes bfloat16 queries and pools, not {q.dtype} and {latents.dtype}"
    if q.shape[2] != LATENT + ROPE:
        return f"it takes heads of {LATENT + ROPE} channels, not {q.shape[2]}"
    if slots.dtype != torch.int32 or not latents.is_contiguous():
        return "it takes slots as int32 and pools that are contiguous"
    return None


@OP.backend("tilelang", needs=TILELANG, rejects=_rejects_tilelang)
def _tilelang(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    from baleen_kernels.own import mla_slots_tilelang as own

    return _in_parts(own.attend, q, latents, slots, softmax_scale)


def _in_parts(attend: Any, q: Tensor, latents: Tensor, slots: Tensor, softmax_scale: float) -> Tensor:
    """`attend` of a module of `own`, over a selection that is cut where tokens are few."""
    from baleen_kernels.own import merge_parts

    num_parts = parts_of(q.shape[0], q.shape[1], slots.shape[1])
    parts, sums = attend(q.contiguous(), latents, slots.contiguous(), softmax_scale=softmax_scale, parts=num_parts)
    return parts[:, 0] if num_parts == 1 else merge_parts.merge(parts, sums)


def _rejects_fa3(q: Tensor, latents: Tensor, slots: Tensor, **_: Any) -> str | None:
    del slots
    return "it reads bfloat16 pools" if latents.dtype != torch.bfloat16 else _rejects_flashmla(q)


@OP.backend("fa3", needs=PAGED_FA3, rejects=_rejects_fa3)
def _fa3(q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
    """Every query is a sequence of its own, every slot a page of one key; the latents are the values.

    On an H200 it takes 1.0 to 1.5 times the time of `flashmla_sparse`.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return q.new_empty(0, num_heads, LATENT)
    pages, counts = compact_slots.compact_slots(slots.contiguous(), backend="triton")
    pool = latents[:, None, None]
    return flash_attn_varlen_func(
        q=q[..., LATENT:],
        k=pool[..., LATENT:],
        v=pool[..., :LATENT],
        q_v=q[..., :LATENT],
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device),
        max_seqlen_k=slots.shape[1],
        seqused_k=counts,
        block_table=pages,
        softmax_scale=softmax_scale,
        causal=True,
        # Of many tokens the library cuts selections that would fill the device uncut: 0 leaves it to the library.
        num_splits=1 if parts_of(num_tokens, num_heads, slots.shape[1]) == 1 else 0,
        fa_version=3,
    )


def _call_flashmla_kv(q: Tensor, latents: Tensor, slots: Tensor, softmax_scale: float, plan: Any) -> Tensor:
    from flash_mla import flash_mla_with_kvcache  # pyright: ignore[reportMissingImports]

    out, _ = flash_mla_with_kvcache(
        with_whole_tiles(q)[:, None],
        latents.view(-1, 64, 1, latents.shape[1]),
        None,
        None,
        LATENT,
        plan,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=True,
        indices=slots[:, None],
        use_legacy=True,
    )
    return out[:, 0, : q.shape[1]]


def flashmla_plan() -> Any:
    """An empty plan for the flashmla_kv backend: the first call fills it, calls of equal shapes share it."""
    from flash_mla import get_mla_metadata  # pyright: ignore[reportMissingImports]

    return get_mla_metadata()[0]


def mla_slots(
    q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float, plan: Any = None, backend: str = "torch"
) -> Tensor:
    """See the module docstring. `plan`: what `flashmla_plan` returned for calls of these shapes, or None."""
    if plan is not None and backend == "flashmla_kv":
        return _call_flashmla_kv(q, latents, slots, softmax_scale, plan)
    return OP.pick(backend)(q, latents, slots, softmax_scale=softmax_scale)
