"""The measurements of single ops: shapes of DeepSeek-V3.2, the bytes and operations that each cannot do without.

A measurement is a factory: it makes fresh random inputs on the GPU when its turn comes and frees them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from baleen_kernels import (
    expert_tiles,
    fp8_gemm,
    fp8_quant,
    greedy_choice,
    grouped_gemm,
    index_scores,
    indexer_prep,
    mha_dense,
    mla_pages,
    mla_prep,
    mla_slots,
    moe_route,
    norm_quant,
    swiglu_quant,
    topk_slots,
)
from torch import Tensor

HIDDEN, INNER, EXPERTS, PICKS = 7168, 2048, 256, 8
# Backends of sparse attention, and whether the pools that each reads are packed; those of our own that have bars, of
# which the first takes prompts.
_ATTENTION = {
    "flashmla_kv": (True,),
    "flashmla_sparse": (False,),
    "fa3": (False,),
    "tilelang": (False,),
    "triton": (False, True),
}
_OWN = (("tilelang", False), ("triton", False))
# Not among what a GPU's libraries are installed with: where they are missing, nothing is amiss.
OPTIONAL = (("mla_slots", "fa3"), ("mla_slots", "tilelang"))


@dataclass(frozen=True, slots=True)
class Work:
    """A call, and the least that it must move and compute. `library`: the same by the best library, for the ratio.

    dtype: whose arithmetic limit applies.
    """

    call: Callable[[], object]
    num_bytes: float = 0.0
    flops: float = 0.0
    dtype: str = "bf16"
    library: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """`limit_us`: a bar on the time; `least_tb_s`, `least_tflops`: bars on rates."""

    op: str
    backend: str
    shape: str
    make: Callable[[], Work]
    limit_us: float | None = None
    least_tb_s: float | None = None
    least_tflops: float | None = None


def measurements() -> Iterator[Measurement]:
    """All of them, cheap ones first."""
    for rows, keys, limit in (
        (64, 8192, 20.0),
        (1, 131_072, 25.0),
        (4096, 32_768, 300.0),
        (4096, 8192, None),
        (64, 65_536, None),
    ):
        yield Measurement("topk_slots", "cuda", f"{rows}x{keys}", lambda r=rows, k=keys: _topk(r, k), limit_us=limit)
    for tokens in (1, 64, 128, 4096):
        small, large = (8.0, None) if tokens == 1 else (None, 2.5 if tokens == 4096 else None)
        shape = f"{tokens} tokens"
        yield Measurement("indexer_prep", "cuda", shape, lambda t=tokens: _indexer_prep(t), small, large)
        for packed in (False, True):
            name = f"{shape}, {'fp8' if packed else 'bf16'} pool"
            yield Measurement("mla_prep", "triton", name, lambda t=tokens, p=packed: _mla_prep(t, p), small, large)
        yield Measurement("norm_quant", "triton", shape, lambda t=tokens: _norm_quant(t))
        yield Measurement("fp8_quant", "triton", shape, lambda t=tokens: _fp8_quant(t))
        yield Measurement("moe_route", "triton", shape, lambda t=tokens: _route(t))
        yield Measurement("swiglu_quant", "triton", f"{shape}, masked", lambda t=tokens: _swiglu(t))
    for tokens, out, width in ((16, 7168, 2048), (128, 24_576, 1536), (4096, 24_576, 1536), (4096, 7168, 16_384)):
        shape = f"{tokens}x{out}x{width}"
        yield Measurement("fp8_gemm", "deep_gemm", shape, lambda t=tokens, n=out, k=width: _gemm(t, n, k))
    for requests, keys in ((1, 131_072), (64, 8192), (64, 65_536)):
        shape = f"{requests}x{keys}"
        yield Measurement("paged_scores", "deep_gemm", shape, lambda b=requests, n=keys: _paged(b, n))
    for keys in (4096, 32_768):
        yield Measurement("ragged_scores", "deep_gemm", f"4096x{keys}", lambda n=keys: _ragged(n))
    for tokens in (1, 16, 64, 128, 256):
        for backend, pools in _ATTENTION.items():
            for packed in pools:
                name = f"decode {tokens}, {_pool_name(packed)}"
                make = lambda t=tokens, p=packed, b=backend: _attend(t, b, packed=p)  # noqa: E731
                least = 250.0 if (backend, packed) in _OWN and tokens >= 128 else None
                yield Measurement("mla_slots", backend, name, make, least_tflops=least)
    for num_slots in (1 << 13, 1 << 16):
        for backend, packed in (("flashmla_sparse", False), *_OWN, ("triton", True)):
            name = f"prefill 4096 of {num_slots >> 10}K, {_pool_name(packed)}"
            make = lambda n=num_slots, p=packed, b=backend: _attend(4096, b, packed=p, num_slots=n)  # noqa: E731
            least = 400.0 if (backend, packed) == _OWN[0] else None
            yield Measurement("mla_slots", backend, name, make, least_tflops=least)
    for rows, keys in ((1, 131_072), (16, 32_768), (128, 4096)):
        for backend in ("flashmla", "triton"):
            make = lambda r=rows, n=keys, b=backend: _attend_pages(r, n, b)  # noqa: E731
            yield Measurement("mla_pages", backend, f"{rows}x{keys}", make)
    yield Measurement("mha_dense", "fa3", "8x2048", _dense)
    for tokens in (1, 16, 64, 128):
        for out, width in ((4096, HIDDEN), (HIDDEN, 2048)):
            least = None if tokens == 1 else 3.6
            shape = f"{tokens} tokens x {PICKS} of {EXPERTS}, {out}x{width}"
            make = lambda t=tokens, n=out, k=width: _masked(t, n, k)  # noqa: E731
            yield Measurement("masked_gemm", "deep_gemm", shape, make, least_tb_s=least)

    for tokens in (1, 16, 64, 128):
        yield Measurement("greedy_choice", "triton", f"{tokens} x 129280", lambda t=tokens: _greedy(t))
        least = None if tokens == 1 else 3.6
        shape = f"{tokens} tokens x {PICKS} of {EXPERTS}"
        for op, make in (("tile_hidden", _tile_hidden), ("tile_out", _tile_out)):
            yield Measurement(op, "triton", shape, lambda t=tokens, m=make: m(t), least_tb_s=least)


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _fp8(*shape: int) -> Tensor:
    """Random numbers, by slices, because the largest would not fit in a wider format."""
    out = torch.empty(*shape, dtype=torch.float8_e4m3fn, device="cuda")
    for piece in out.unbind(0) if len(shape) == 3 else (out,):
        piece.copy_(_bf16(*piece.shape))
    return out


def _topk(rows: int, keys: int) -> Work:
    scores = torch.randn(rows, keys, device="cuda")
    lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    tables = torch.randperm(keys // 64, device="cuda").int().repeat(rows, 1)
    call = lambda: topk_slots.topk_slots(scores, lengths, tables, topk=2048, backend="cuda")  # noqa: E731
    return Work(call, 4.0 * rows * (keys + 2048), library=lambda: scores.topk(2048, sorted=False))


def _places(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """cos_sin, positions and slots for a pool of 2 * tokens + 128 places, in whole pages."""
    positions = torch.randint(0, 40_000, (tokens,), device="cuda")
    return torch.randn(40_000, 64, device="cuda"), positions, torch.randperm(2 * tokens, device="cuda")[:tokens]


def _indexer_prep(tokens: int) -> Work:
    q, k = _bf16(tokens, 64, 128), _bf16(tokens, 2304)[:, :128]
    weights, norm = torch.randn(tokens, 64, device="cuda"), torch.randn(128, device="cuda")
    pages = torch.zeros(tokens // 32 + 2, 8448, dtype=torch.uint8, device="cuda")
    inputs = (q, k, weights, norm, norm, *_places(tokens), pages)
    call = lambda: indexer_prep.indexer_prep(*inputs, scale_ue8m0=True, backend="cuda")  # noqa: E731
    return Work(call, tokens * (8192 * 3 + 2 * 64 * 4 + 256 + 132))


def _mla_prep(tokens: int, packed: bool) -> Work:
    x, q_norm, kv_norm = (
        _bf16(tokens, 2304)[:, :2112],
        torch.randn(1536, device="cuda"),
        torch.randn(512, device="cuda"),
    )
    shape, dtype = (656, torch.uint8) if packed else (576, torch.bfloat16)
    latents = torch.zeros(2 * tokens + 128, shape, dtype=dtype, device="cuda")
    inputs = (x, q_norm, kv_norm, *_places(tokens), latents)
    call = lambda: mla_prep.mla_prep(*inputs, scale_ue8m0=True, backend="triton")  # noqa: E731
    return Work(call, tokens * (2112 * 2 + 1536 + 48 + shape * latents.element_size()))


def _norm_quant(tokens: int) -> Work:
    residual, delta, weight = _bf16(tokens, HIDDEN), _bf16(tokens, HIDDEN), torch.randn(HIDDEN, device="cuda")
    options = {"eps": 1e-6, "scale_ue8m0": True, "backend": "triton"}
    return Work(lambda: norm_quant.norm_quant(residual, delta, weight, **options), tokens * HIDDEN * 9.0)


def _fp8_quant(tokens: int) -> Work:
    x = _bf16(tokens, HIDDEN)
    call = lambda: fp8_quant.quantize_groups(x, scale_ue8m0=True, backend="triton")  # noqa: E731
    return Work(call, tokens * HIDDEN * 3.0)


def _route(tokens: int) -> Work:
    logits, bias = torch.randn(tokens, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda")
    options = {"num_groups": 8, "topk_groups": 4, "topk": PICKS, "normalize": True, "scaling_factor": 2.5}
    return Work(lambda: moe_route.moe_route(logits, bias, **options, backend="triton"), tokens * (EXPERTS * 4 + 96.0))


def _counts(tokens: int) -> Tensor:
    """Rows of each expert where every token picks eight at random, as balanced traffic does."""
    picks = torch.rand(tokens, EXPERTS, device="cuda").argsort(-1)[:, :PICKS].flatten()
    return torch.bincount(picks, minlength=EXPERTS).int()


def _swiglu(tokens: int) -> Work:
    counts = _counts(tokens)
    room = -(-int(counts.max()) // 64) * 64
    gate_up = _bf16(EXPERTS, room, 4096)
    call = lambda: swiglu_quant.swiglu_quant(gate_up, counts, scale_ue8m0=True, backend="triton")  # noqa: E731
    return Work(call, tokens * PICKS * (4096 * 2 + 2048 + 64.0))


def _gemm(tokens: int, out: int, width: int) -> Work:
    values, scales = fp8_quant.quantize_groups(_bf16(tokens, width), scale_ue8m0=True, backend="triton")
    weight, weight_scale = _fp8(out, width), torch.rand(-(-out // 128), width // 128, device="cuda")
    call = lambda: fp8_gemm.fp8_gemm(values, scales, weight, weight_scale, backend="deep_gemm")  # noqa: E731
    return Work(call, out * width + tokens * (width + 2.0 * out), 2.0 * tokens * out * width, "fp8")


def _masked(tokens: int, out: int, width: int) -> Work:
    counts = _counts(tokens)
    room = -(-int(counts.max()) // 64) * 64
    values, weight = _fp8(EXPERTS, room, width), _fp8(EXPERTS, out, width)
    scales = torch.rand(EXPERTS, width // 128, room, device="cuda").transpose(1, 2)
    weight_scale = torch.rand(EXPERTS, out // 128, width // 128, device="cuda")
    expected = max(1, tokens * PICKS // EXPERTS)
    inputs = (values, scales, weight, weight_scale, counts)
    call = lambda: grouped_gemm.masked_gemm(*inputs, expected_rows=expected, backend="deep_gemm")  # noqa: E731
    active = int((counts > 0).sum())
    return Work(call, float(active) * out * width, 2.0 * tokens * PICKS * out * width, "fp8")


def _tiles(tokens: int) -> tuple[tuple[Tensor, Tensor], int]:
    """The tiles of tokens that each pick eight experts at random, and how many experts have any."""
    picks = torch.rand(tokens, EXPERTS, device="cuda").argsort(-1)[:, :PICKS]
    return expert_tiles.moe_tiles(picks, num_experts=EXPERTS, backend="triton"), picks.unique().numel()


def _tile_hidden(tokens: int) -> Work:
    tiles, active = _tiles(tokens)
    rounded = fp8_quant.quantize_groups(_bf16(tokens, HIDDEN), scale_ue8m0=True, backend="triton")
    weight, scale = (
        _fp8(EXPERTS, 2 * INNER, HIDDEN),
        torch.rand(EXPERTS, 2 * INNER // 128, HIDDEN // 128, device="cuda"),
    )
    options = {"picks": PICKS, "scale_ue8m0": True, "backend": "triton"}
    call = lambda: expert_tiles.tile_hidden(*rounded, weight, scale, *tiles, **options)  # noqa: E731
    return Work(call, 2.0 * active * INNER * HIDDEN, 4.0 * tokens * PICKS * INNER * HIDDEN, "fp8")


def _tile_out(tokens: int) -> Work:
    tiles, active = _tiles(tokens)
    values, scales = fp8_quant.quantize_groups(_bf16(tokens * PICKS, INNER), scale_ue8m0=True, backend="triton")
    weight, scale = _fp8(EXPERTS, HIDDEN, INNER), torch.rand(EXPERTS, HIDDEN // 128, INNER // 128, device="cuda")
    rows = values, scales.contiguous()
    call = lambda: expert_tiles.tile_out(*rows, weight, scale, *tiles, backend="triton")  # noqa: E731
    return Work(call, 1.0 * active * INNER * HIDDEN, 2.0 * tokens * PICKS * INNER * HIDDEN, "fp8")


def _greedy(tokens: int) -> Work:
    logits = torch.randn(tokens, 129_280, device="cuda")
    call = lambda: greedy_choice.greedy_choice(logits, backend="triton")  # noqa: E731
    return Work(call, 4.0 * logits.numel(), library=lambda: logits.argmax(-1))


def _paged(requests: int, keys: int) -> Work:
    q, weights = _fp8(requests, 64, 128), torch.randn(requests, 64, device="cuda")
    num_pages = requests * keys // 64 + 1
    pages = torch.randint(0, 100, (num_pages, 8448), dtype=torch.uint8, device="cuda")
    lengths = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
    tables = 1 + torch.randperm(num_pages - 1, device="cuda").int().view(requests, -1)
    schedule = index_scores.paged_schedule(lengths)
    inputs = (q, weights, pages, lengths, tables, schedule)
    call = lambda: index_scores.paged_scores(*inputs, max_length=keys, backend="deep_gemm")  # noqa: E731
    return Work(call, requests * keys * 136.0, 2.0 * requests * keys * 64 * 128, "fp8")


def _ragged(keys: int) -> Work:
    tokens = 4096
    q, weights, k = _fp8(tokens, 64, 128), torch.randn(tokens, 64, device="cuda"), _fp8(keys, 128)
    starts = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    ends = keys - tokens + 1 + torch.arange(tokens, dtype=torch.int32, device="cuda")
    inputs = (q, weights, k, torch.rand(keys, device="cuda"), starts, ends)
    seen = float(ends.sum())
    call = lambda: index_scores.ragged_scores(*inputs, backend="deep_gemm")  # noqa: E731
    return Work(call, 4.0 * seen, 2.0 * seen * 64 * 128, "fp8")


def _pool_name(packed: bool) -> str:
    return f"{'fp8' if packed else 'bf16'} pool"


def _attend(tokens: int, backend: str, *, packed: bool, num_slots: int = 1 << 16) -> Work:
    heads, topk = 128, 2048
    if packed:
        latents = torch.randint(0, 100, (num_slots, 656), dtype=torch.uint8, device="cuda")
        latents[:, 512:528] = torch.ones(4, device="cuda").view(torch.uint8)
        latents[:, 528:] = _bf16(num_slots, 64).view(torch.uint8)
    else:
        latents = _bf16(num_slots, 576)
    picks = [torch.randperm(num_slots, device="cuda")[:topk].int() for _ in range(min(tokens, 256))]
    slots = torch.stack(picks).repeat(-(-tokens // len(picks)), 1)[:tokens]
    q = _bf16(tokens, heads, 576)
    call = lambda: mla_slots.mla_slots(q, latents, slots, softmax_scale=0.1, backend=backend)  # noqa: E731
    num_bytes = min(tokens * topk * latents.stride(0) * float(latents.element_size()), float(latents.nbytes))
    return Work(call, num_bytes, 2.0 * tokens * heads * topk * 1088)


def _attend_pages(rows: int, keys: int, backend: str) -> Work:
    heads, num_pages = 128, rows * keys // 64
    latents, q = _bf16(64 * num_pages, 576), _bf16(rows, heads, 576)
    tables = torch.randperm(num_pages, device="cuda").int().view(rows, -1)
    lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    inputs = (q, latents, tables, lengths)
    call = lambda: mla_pages.mla_pages(*inputs, softmax_scale=0.1, backend=backend)  # noqa: E731
    return Work(call, float(latents.nbytes), 2.0 * rows * heads * keys * 1088)


def _dense() -> Work:
    requests, length, heads = 8, 2048, 128
    q, k, v = (_bf16(requests * length, heads, width) for width in (192, 192, 128))
    offsets = torch.arange(0, requests * length + 1, length, dtype=torch.int32, device="cuda")
    from fa3_fwd_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    assert "fa3" in mha_dense.OP.backends
    # The library itself: the op's offsets come from the host, which a graph cannot copy again.
    args = (q, k, v, offsets, offsets, length, length)
    call = lambda: flash_attn_varlen_func(*args, softmax_scale=0.1, causal=True)  # noqa: E731
    return Work(call, 0.0, requests * heads * length * (length + 1.0) * (192 + 128))
