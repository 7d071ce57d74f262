"""`python -m baleen_worker compile MODEL_DIR …`: compiles every kernel that a worker with these flags would compile.

Kernels are compiled for the shapes they are called with, one at a time, and a new machine needs over a hundred of them:
minutes in one process, less than one in as many as there are cores. Each job calls one op once, with tensors of the
right shapes and no contents; what it compiles is kept in the caches on disk that workers read. The proof of each chosen
kernel is a job too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from baleen_kernels import fp8_quant, grouped_gemm, moe_choose, moe_permute, proof, selection, value_quant
from baleen_kernels.fp8_quant import TILE
from baleen_kernels.registry import OPS
from tqdm import tqdm

from baleen_worker.cache.storage import FP8
from baleen_worker.command_line import parse
from baleen_worker.config import ConfigError
from baleen_worker.decode_graphs import padded_sizes
from baleen_worker.model.fused.experts import MOST_TILED
from baleen_worker.model.fused.ops import ROLES, FusedOps
from baleen_worker.model.fused.weights import Fp8Matrix
from baleen_worker.model_config import load_model_config
from baleen_worker.model_kernels import resolve_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baleen_worker.config import WorkerConfig
    from baleen_worker.model_config import ModelConfig

Job = tuple[str, "Callable[[], object]"]
_PART = "--part"


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if a kernel could not be compiled or is wrong; 2 for a command line that cannot be honoured."""
    part, arguments = _part(list(arguments))
    try:
        config = parse(arguments).worker
        kernels = resolve_kernels(config, load_model_config(config.model_dir, config.model_overrides))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if kernels.selection is None:
        print(f"nothing to compile: plain arithmetic is used, since {kernels.why_plain}")
        return 0
    model_config = load_model_config(config.model_dir, config.model_overrides)
    all_jobs = jobs(config, model_config, kernels.selection)
    if part is None:
        return _share_out(arguments, len(all_jobs))
    first, step = part
    for name, job in all_jobs[first::step]:
        print(json.dumps(run(name, job)), flush=True)
    return 0


def run(name: str, job: Callable[[], object]) -> dict[str, Any]:
    """Runs one job and says how it went."""
    started = time.monotonic()
    error = None
    try:
        job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as caught:  # noqa: BLE001 - whatever a library or a compiler raises is the outcome of its job
        error = f"{type(caught).__name__}: {caught}"[:600]
    return {"job": name, "seconds": round(time.monotonic() - started, 2), "error": error}


def _part(arguments: list[str]) -> tuple[tuple[int, int] | None, list[str]]:
    if _PART not in arguments:
        return None, arguments
    place = arguments.index(_PART)
    first, _, step = arguments[place + 1].partition("/")
    return (int(first), int(step)), arguments[:place] + arguments[place + 2 :]


def _share_out(arguments: Sequence[str], num_jobs: int) -> int:
    """Runs all jobs in as many processes as there are cores, and shows their progress."""
    count = max(1, min(len(os.sched_getaffinity(0)) - 1, num_jobs))
    command = [sys.executable, "-m", "baleen_worker", "compile", *arguments]
    children = [
        subprocess.Popen([*command, _PART, f"{first}/{count}"], stdout=subprocess.PIPE, text=True)
        for first in range(count)
    ]
    failed: list[dict[str, Any]] = []
    done = 0
    with tqdm(total=num_jobs, desc="compiling kernels", file=sys.stderr) as bar:
        for child in children:
            assert child.stdout is not None
            for line in child.stdout:
                if not line.startswith("{"):
                    continue
                outcome = json.loads(line)
                done += 1
                bar.update()
                if outcome["error"] is not None:
                    failed.append(outcome)
    codes = [child.wait() for child in children]
    for outcome in failed:
        print(f"error: {outcome['job']}: {outcome['error']}")
    print(f"{done - len(failed)} of {num_jobs} kernels are compiled and right")
    return 1 if failed or any(codes) or done < num_jobs else 0


def jobs(config: WorkerConfig, model_config: ModelConfig, chosen: selection.Selection) -> list[Job]:
    """Everything, the longest first."""
    device = "cpu" if chosen.machine.arch == "cpu" else "cuda"
    shapes = _Shapes(config, model_config, FusedOps.of(chosen), device)
    proofs: list[Job] = [
        (f"proof of {choice.role}", lambda choice=choice: proof.prove(OPS[choice.op], choice.backend, device=device))
        for choice in chosen.choices
        if choice.role in ROLES and choice.backend != "torch"
    ]
    return [*shapes.matrix_products(), *shapes.scores(), *proofs, *shapes.fused_ops()]


class _Shapes:
    """Calls of the shapes that the fused model makes, for steps of every captured size and of a whole prompt piece."""

    def __init__(self, config: WorkerConfig, model: ModelConfig, ops: FusedOps, device: str) -> None:
        self._model, self._ops, self._device = model, ops, device
        self._sizes = list(config.cuda_graph_bs) or padded_sizes(config.max_running_requests)
        budget = config.chunked_prefill_size
        self._piece = model.max_position_embeddings if budget == -1 else budget
        self._packed = config.kv_cache_dtype == FP8
        self._context = min(config.context_length or model.max_position_embeddings, model.max_position_embeddings)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self._device)

    def _matrix(self, *shape: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=self._device)
        grid = (*shape[:-2], -(-shape[-2] // TILE), -(-shape[-1] // TILE))
        return values, self._empty(*grid, dtype=torch.float32)

    def _rounded(self, tokens: int, width: int) -> tuple[Tensor, Tensor]:
        return self._ops.fp8_quant(self._empty(tokens, width), scale_ue8m0=True)

    def _linear_shapes(self) -> set[tuple[int, int]]:
        m = self._model
        q_lora, heads = m.q_lora_rank or 0, m.num_attention_heads
        q_width = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        latent = m.kv_lora_rank + m.qk_rope_head_dim
        shared = m.moe_intermediate_size * m.n_shared_experts
        return {
            (m.index_head_dim + q_lora + latent, m.hidden_size),
            (q_width, q_lora),
            (q_width + m.index_n_heads * m.index_head_dim, q_lora),
            (m.hidden_size, heads * m.v_head_dim),
            (2 * m.intermediate_size, m.hidden_size),
            (m.hidden_size, m.intermediate_size),
            (2 * shared, m.hidden_size),
            (m.hidden_size, shared),
        }

    def matrix_products(self) -> list[Job]:
        """Block-FP8 products of all widths, and those of the experts in both shapes."""
        m = self._model
        found: list[Job] = []
        linear = {(n, k, tokens) for n, k in self._linear_shapes() for tokens in (*self._sizes, self._piece)}
        expert = ((2 * m.moe_intermediate_size, m.hidden_size), (m.hidden_size, m.moe_intermediate_size))
        for n, k in expert:
            found.append((f"contiguous_gemm {n} x {k}", lambda n=n, k=k: self._contiguous(n, k)))
        for n, k, tokens in sorted(linear):
            found.append((f"fp8_gemm {tokens} x {n} x {k}", lambda t=tokens, n=n, k=k: self._linear(t, n, k)))
        return found

    def _linear(self, tokens: int, n: int, k: int) -> object:
        return self._ops.product(self._rounded(tokens, k), Fp8Matrix(*self._matrix(n, k)), torch.bfloat16)

    def _contiguous(self, n: int, k: int) -> object:
        experts = self._model.n_routed_experts
        rows = moe_permute.segment_rows(self._piece * self._model.num_experts_per_tok, experts)
        values, scales = self._rounded(rows, k)
        # Rows of no expert: compiled alike, computed fast.
        owners = torch.full((rows,), -1, dtype=torch.int32, device=self._device)
        owners[: grouped_gemm.SEGMENT] = 0
        return self._ops.contiguous_gemm(values, scales, *self._matrix(experts, n, k), owners)

    def scores(self) -> list[Job]:
        """Index scores and selections."""
        found: list[Job] = [("ragged_scores and topk_slots", self._ragged)]
        found += [(f"paged_scores {size}", lambda size=size: self._paged(size)) for size in self._sizes]
        return found

    def _ragged(self) -> object:
        m, tokens = self._model, 256
        q = self._empty(tokens, m.index_n_heads, m.index_head_dim, dtype=torch.float8_e4m3fn)
        weights = self._empty(tokens, m.index_n_heads, dtype=torch.float32)
        keys, scales = (
            self._empty(4096, m.index_head_dim, dtype=torch.float8_e4m3fn),
            self._empty(4096, dtype=torch.float32),
        )
        lengths = torch.full((tokens,), 4096, dtype=torch.int32, device=self._device)
        zeros = torch.zeros_like(lengths)
        scores = self._ops.ragged_scores(q, weights, keys, scales, zeros, lengths)
        return self._ops.topk_slots(scores, lengths, self._empty(1, 64, dtype=torch.int32), zeros, topk=m.index_topk)

    def _paged(self, size: int) -> object:
        m = self._model
        q = self._empty(size, m.index_n_heads, m.index_head_dim, dtype=torch.float8_e4m3fn)
        weights = self._empty(size, m.index_n_heads, dtype=torch.float32)
        pages = self._empty(4, 64 * (m.index_head_dim + 4), dtype=torch.uint8)
        lengths = torch.ones(size, dtype=torch.int32, device=self._device)
        num_pages = -(-self._context // 64)
        tables = self._empty(size, num_pages, dtype=torch.int32)
        schedule = self._ops.schedule_of(lengths)
        return self._ops.paged_scores(q, weights, pages, lengths, tables, schedule, max_length=64 * num_pages)

    def fused_ops(self) -> list[Job]:
        """The small kernels, for few tokens and for many."""
        found: list[Job] = [("choice of tokens", self._choice)]
        for tokens in sorted({1, 16, *self._sizes[-1:], min(self._piece, 4096)}):
            found.append((f"around attention, {tokens} tokens", lambda t=tokens: self._around_attention(t)))
            found.append((f"around experts, {tokens} tokens", lambda t=tokens: self._around_experts(t)))
        return found

    def _choice(self) -> object:
        """The tokens of a few rows, and what grammars forbid."""
        vocab, rows = self._model.vocab_size, 2
        logits = self._empty(rows, vocab, dtype=torch.float32)
        whole = self._empty(rows, dtype=torch.int64)
        self._ops.mask_logits(logits, whole[:1], self._empty(1, -(-vocab // 32), dtype=torch.int32))
        share = self._empty(rows, dtype=torch.float64) + 0.5
        self._ops.sample(logits, whole, share, None, None, share, whole)
        return self._ops.sample(logits, whole, share, whole, share, share, whole)

    def _around_attention(self, tokens: int) -> None:
        m, ops = self._model, self._ops
        hidden, heads, rope = m.hidden_size, m.num_attention_heads, m.qk_rope_head_dim
        q_lora = m.q_lora_rank or 0
        for delta in (None, self._empty(tokens, hidden)):
            norm = self._empty(hidden, dtype=torch.float32)
            ops.norm_quant(self._empty(tokens, hidden), delta, norm, eps=m.rms_norm_eps, scale_ue8m0=True)
        places = torch.arange(tokens, device=self._device)
        angles = self._empty(tokens, rope, dtype=torch.float32), places
        width = m.index_head_dim + q_lora + m.kv_lora_rank + rope
        latents = (
            self._empty(tokens, m.kv_lora_rank + m.kv_lora_rank // 32 + 2 * rope, dtype=torch.uint8)
            if self._packed
            else self._empty(tokens, m.kv_lora_rank + rope)
        )
        norms = self._empty(q_lora, dtype=torch.float32), self._empty(m.kv_lora_rank, dtype=torch.float32)
        x = self._empty(tokens, width)
        ops.mla_prep(x[:, m.index_head_dim :], *norms, *angles, places, latents, scale_ue8m0=True)
        pages = self._empty(tokens // 64 + 1, 64 * (m.index_head_dim + 4), dtype=torch.uint8)
        for num_heads in (0, m.index_n_heads):
            q = self._empty(tokens, num_heads, m.index_head_dim)
            weights = self._empty(tokens, num_heads, dtype=torch.float32)
            norm = self._empty(m.index_head_dim, dtype=torch.float32)
            ops.indexer_prep(q, x[:, : m.index_head_dim], weights, norm, norm, *angles, places, pages, scale_ue8m0=True)
        q = self._empty(tokens, heads, m.qk_nope_head_dim + rope)
        ops.rotate_queries(q, *angles)
        ops.absorb_queries(q, *angles, self._empty(heads, m.qk_nope_head_dim, m.kv_lora_rank))
        self._rounded(tokens, heads * m.v_head_dim)
        if tokens <= value_quant.MOST_TOKENS and m.v_head_dim == fp8_quant.GROUP:
            latent = self._empty(tokens, heads, m.kv_lora_rank)
            ops.value_quant(latent, self._empty(heads, m.kv_lora_rank, m.v_head_dim), scale_ue8m0=True)

    def _around_experts(self, tokens: int) -> None:
        m, ops = self._model, self._ops
        experts, topk, inner = m.n_routed_experts, m.num_experts_per_tok, m.moe_intermediate_size
        choice: dict[str, Any] = {
            "num_groups": m.n_group,
            "topk_groups": m.topk_group,
            "topk": topk,
            "normalize": m.norm_topk_prob,
            "scaling_factor": m.routed_scaling_factor,
        }
        bias, logits = (self._empty(*shape, dtype=torch.float32) for shape in ((experts,), (tokens, experts)))
        ids, weights = ops.moe_route(logits, bias, **choice)
        rounded = self._rounded(tokens, m.hidden_size)
        y = self._empty(tokens, m.hidden_size)
        if tokens <= moe_choose.MOST_TOKENS and ops.backends["moe_choose"] != "torch":
            router = self._empty(experts, m.hidden_size)
            weights, *tiles = ops.moe_choose(y, router, bias, None, **choice)
            self._put_together(y, self._tiled(rounded, tiles, topk + 1), weights, None)
        elif tokens <= MOST_TILED:
            tiles = ops.moe_tiles(ids, num_experts=experts)
            self._put_together(y, self._tiled(rounded, tiles, topk), weights, y)
        else:
            room = moe_permute.segment_rows(ids.numel(), experts)
            places, owners = ops.moe_segments(ids, num_experts=experts)
            ops.swiglu_quant(self._empty(1, room, 2 * inner), None, scale_ue8m0=True, expert_of_row=owners)
            ops.moe_scatter(*rounded, places, num_boxes=1, room=room)
            ops.moe_combine(self._empty(room, m.hidden_size), places, weights, y)
        for width in {inner * m.n_shared_experts, m.intermediate_size}:
            ops.swiglu_quant(self._empty(1, tokens, 2 * width), None, scale_ue8m0=True)

    def _put_together(self, residual: Tensor, rows: Tensor, weights: Tensor, shared: Tensor | None) -> None:
        norm = self._empty(residual.shape[1], dtype=torch.float32)
        options = {"eps": self._model.rms_norm_eps, "scale_ue8m0": True}
        self._ops.combine_norm(residual, rows, weights, shared, norm, **options)

    def _tiled(self, rounded: tuple[Tensor, Tensor], tiles: Sequence[Tensor], picks: int) -> Tensor:
        m, ops = self._model, self._ops
        inner = m.moe_intermediate_size
        # One expert's weights under the name of all: what is compiled depends on their shape alone.
        owners = torch.where(tiles[0] < 0, tiles[0], 0)
        gate_up, down = self._matrix(1, 2 * inner, m.hidden_size), self._matrix(1, m.hidden_size, inner)
        hidden = ops.tile_hidden(*rounded, *gate_up, owners, tiles[1], picks=picks, scale_ue8m0=True)
        return ops.tile_out(*hidden, *down, owners, tiles[1])
