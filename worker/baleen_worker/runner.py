"""Builds a runner from a model folder: device, dtype, kernels, weights, memory, graphs, in that order.

On a GPU memory is measured, not guessed: the largest steps are run on a pool of two pages, the largest graphs are
captured on one and dropped, twice, since what is loaded the first time stays and is not taken again, and what then
remains of the operator's fraction becomes pages. The account is logged.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from baleen_worker import logit_processors
from baleen_worker.cache.host_pool import CopyingRunner, HostPool, host_pages
from baleen_worker.cache.page_bytes import PoolPages
from baleen_worker.cache.storage import (
    KvLayout,
    PagedPools,
    choose_layout,
    device_capacity_pages,
    host_capacity_pages,
)
from baleen_worker.decode_graphs import DecodeGraphs, GraphCapture, padded_sizes
from baleen_worker.memory_account import MemoryAccount, expected_graph_bytes
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.fused.model import FusedModel
from baleen_worker.model.fused.ops import FusedOps
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import ModelConfig, load_model_config
from baleen_worker.model_kernels import ModelKernels, choose_kernels, device_of, dtype_of
from baleen_worker.model_runner import Model, ModelRunner
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, BuiltRunner, PlannedRow, StepPlan
from baleen_worker.weights import LoadReport, fill_with_dummy_weights, load_weights
from baleen_worker.weights_identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baleen_worker.config import WorkerConfig
    from baleen_worker.logit_processors import LogitProcessor

_MAX_CPU_THREADS = 16
# Sizes below the largest whose graphs say how much those of every other one take.
_MEASURED_SIZES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Build:
    """What a runner is made of besides its pools."""

    config: WorkerConfig
    model: Model
    layout: KvLayout
    device: torch.device
    dtype: torch.dtype
    context_len: int
    graph_sizes: Sequence[int]
    processors: Mapping[str, LogitProcessor]

    def runner(self, num_pages: int) -> tuple[ModelRunner, PagedPools]:
        """A runner with pools of that many pages, the sink included."""
        pools = PagedPools(self.layout, num_pages, device=self.device, dtype=self.dtype)
        runner = ModelRunner(
            self.model,
            pools,
            max_running_requests=self.config.max_running_requests,
            context_len=self.context_len,
            page_size=self.config.page_size,
            device=self.device,
            logit_processors=self.processors,
            capture=GraphCapture(self.device) if self.graph_sizes else None,
            graph_sizes=self.graph_sizes,
        )
        return runner, pools


def build_runner(config: WorkerConfig, *, on_progress: Callable[[int, int], None] | None = None) -> BuiltRunner:
    """Reads the model folder, loads the weights, takes memory for the pools and runs the model once.

    `on_progress` gets (bytes loaded, bytes in all). Raises ValueError, with a sentence for the operator, for whatever
    the folder, the device or its memory does not allow.
    """
    device = device_of(config.device)
    dtype = dtype_of(config.dtype, device)
    model_config = load_model_config(config.model_dir, config.model_overrides)
    if config.uniform_routing and config.load_format != "dummy":
        raise ValueError("--uniform-routing makes answers meaningless: it goes with --load-format dummy alone")
    numerics = Numerics.for_dtype(dtype)
    # The transform exists for powers of two; it only spreads rounding errors, so others do without.
    width = model_config.index_head_dim
    numerics = replace(numerics, index_hadamard=numerics.index_hadamard and width & (width - 1) == 0)
    layout = choose_layout(
        model_config,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        index_hadamard=numerics.index_hadamard,
    )
    if device.type == "cpu":
        _leave_cores_to_others()
    kernels = choose_kernels(config, model_config, device=device, dtype=dtype)
    free_before = _free_bytes(device)
    context_len = int(min(config.context_length or math.inf, model_config.max_position_embeddings))
    model, report = _load_model(config, model_config, numerics, device, kernels, context_len, on_progress)
    build = _Build(
        config,
        model,
        layout,
        device,
        dtype,
        context_len,
        _graph_sizes(config, kernels, device),
        logit_processors.load(dict(config.logit_processors)),
    )
    if device.type == "cpu":
        useful_tokens = config.max_running_requests * context_len
        num_pages = 1 + host_capacity_pages(
            layout, max_total_tokens=config.max_total_tokens, useful_tokens=useful_tokens
        )
        runner, pools = build.runner(num_pages)
        _warm_up(runner)
    else:
        runner, pools = _fill_device(build, free_before)
    weights = weights_identity(config.model_dir, load_format=config.load_format, seed=config.seed)
    num_host_pages, tiered, poison = 0, runner, pools.poison
    if config.host_cache is not None:
        ratio, size_gb = config.host_cache.ratio, config.host_cache.size_gb
        num_host_pages = host_pages(layout, pools.num_pages - 1, ratio=ratio, size_gb=size_gb)
        pool = HostPool(pools, num_host_pages, by_layer=runner.graphs is None)
        tiered = CopyingRunner(runner, pool, pools.poison)
        poison = tiered.poison
    return BuiltRunner(
        runner=tiered,
        num_pages=pools.num_pages,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        layout_id=f"{layout.layout_id};weights={weights}",
        weights_bytes=report.weights_bytes,
        kv_bytes=pools.num_bytes,
        poison=poison,
        computes_beside=device.type == "cuda",
        num_host_pages=num_host_pages,
        features=kernels.features(),
        page_store=PoolPages(pools),
    )


def empty_model(config: ModelConfig, numerics: Numerics, *, keep_fp8: bool) -> DeepseekForCausalLM:
    """The model without memory for its weights, which a loader then supplies."""
    with torch.device("meta"):
        return DeepseekForCausalLM(config, numerics, keep_fp8=keep_fp8)


def _leave_cores_to_others() -> None:
    """Half of the cores this process may use, unless the operator has chosen.

    Threads of one operation wait for each other, so a core that the head or the gateway needs as well would hold up
    all of them: on two busy cores, two threads are tens of times slower than one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(min(max(cores // 2, 1), _MAX_CPU_THREADS))


def _load_model(
    config: WorkerConfig,
    model_config: ModelConfig,
    numerics: Numerics,
    device: torch.device,
    kernels: ModelKernels,
    context_len: int,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[Model, LoadReport]:
    fused = kernels.selection is not None
    model = empty_model(model_config, numerics, keep_fp8=fused)
    too_large = not fused and _exceeds(model, device, config.mem_fraction_static)
    if too_large and model_config.quantization_config is not None:
        model = empty_model(model_config, numerics, keep_fp8=True)
        logger.info("keeping FP8 weights as stored: dequantised they would not fit the device")
    if config.load_format == "dummy":
        report = fill_with_dummy_weights(model, device=device, seed=config.seed)
    else:
        report = load_weights(model, config.model_dir, model_config, device=device, on_progress=on_progress)
        logger.info(
            "loaded %d tensors, %.1f MiB; skipped %d tensors of multi-token-prediction layers",
            report.num_tensors,
            report.num_bytes_read / 2**20,
            report.num_mtp_tensors_skipped,
        )
    if kernels.selection is None:
        return model, report
    ops = FusedOps.of(kernels.selection)
    uniform = config.uniform_routing
    return FusedModel(model, ops, max_positions=context_len, device=device, uniform_routing=uniform), report


def _exceeds(model: DeepseekForCausalLM, device: torch.device, mem_fraction_static: float) -> bool:
    """Whether the weights as described leave no memory for pages. A host may swap, and decides for itself."""
    if device.type == "cpu":
        return False
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return needed > mem_fraction_static * _free_bytes(device)


def _graph_sizes(config: WorkerConfig, kernels: ModelKernels, device: torch.device) -> Sequence[int]:
    """What decode steps are padded to; nothing for no graphs."""
    if device.type == "cpu" or config.disable_cuda_graph:
        return ()
    obstacle = kernels.graph_obstacle
    if obstacle is not None:
        logger.info("steps run without CUDA graphs: %s", obstacle)
        return ()
    most = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
    return config.cuda_graph_bs or padded_sizes(most)


def _free_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _fill_device(build: _Build, free_before: int) -> tuple[ModelRunner, PagedPools]:
    """The runner with as many pages as fit, its graphs captured."""
    config, device = build.config, build.device
    weights_bytes = torch.cuda.memory_allocated(device)
    workspace_bytes, expected_bytes = _measure(build)
    free_bytes = _settled_free_bytes(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    num_pages = 1 + device_capacity_pages(
        build.layout,
        max_total_tokens=config.max_total_tokens,
        free_before=free_before,
        # The largest step and all graphs count as taken.
        free_now=free_bytes - workspace_bytes - expected_bytes,
        mem_fraction_static=config.mem_fraction_static,
    )
    runner, pools = build.runner(num_pages)
    _warm_up(runner)
    graph_bytes = _capture(runner, device)
    account = MemoryAccount(
        free_before,
        weights_bytes=weights_bytes,
        unused_bytes=unused_bytes,
        kv_bytes=pools.num_bytes,
        kv_tokens=(num_pages - 1) * config.page_size,
        graph_bytes=graph_bytes,
        expected_graph_bytes=expected_bytes,
        workspace_bytes=workspace_bytes,
        free_after=_free_bytes(device),
    )
    for line in account.lines():
        logger.info("%s", line)
    return runner, pools


def _measure(build: _Build) -> tuple[int, int]:
    """Bytes that the largest steps and all graphs take beside weights and pages, on pools of two pages.

    What is loaded on the way stays, and is missing from what is free afterwards.
    """
    device = build.device
    runner, _ = build.runner(2)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _warm_up(runner)
    for plan in _largest_steps(build):
        runner.launch(plan).collect()
    del runner
    graph_bytes = _measure_graphs(lambda: build.runner(2)[0].graphs, lambda: _settled_free_bytes(device))
    workspace_bytes = torch.cuda.max_memory_allocated(device) - before
    return workspace_bytes, graph_bytes


def _measure_graphs(make: Callable[[], DecodeGraphs | None], free_bytes: Callable[[], int]) -> int:
    """Bytes to set aside for the graphs of all sizes.

    `make`: graphs with a memory of their own, of which none is captured; None for no graphs. `free_bytes`: of the
    device, when all that nobody uses has been given back.
    """

    def taken(graphs: DecodeGraphs, sizes: Sequence[int]) -> int:
        free = free_bytes()
        graphs.prepare(sizes)
        return free - free_bytes()

    graphs = make()
    if graphs is None:
        return 0
    graphs.rehearse()
    largest, others = graphs.sizes[-1:], graphs.sizes[:-1][-_MEASURED_SIZES:]
    first = taken(graphs, largest)
    del graphs
    graphs = make()
    assert graphs is not None
    again, rest = taken(graphs, largest), taken(graphs, others)
    num_sizes = len(graphs.sizes)
    told = (first / 2**20, again / 2**20, len(others), rest / 2**20)
    logger.info("graphs of the largest step took %.0f MiB at first, %.0f MiB again, %d other sizes %.0f MiB", *told)
    return expected_graph_bytes(again, rest, num_others=len(others), num_sizes=num_sizes)


def _settled_free_bytes(device: torch.device) -> int:
    """What is free when nothing runs any more and everything that nobody uses has been given back."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return _free_bytes(device)


def _largest_steps(build: _Build) -> list[StepPlan]:
    """Prompt pieces of a whole budget, at the start and at the end of the longest context, all on the sink page."""
    budget = build.config.chunked_prefill_size
    size = build.context_len - 1 if budget == -1 else min(budget, build.context_len - 1)
    admission = Admission(0, SamplingParams(max_tokens=1, seed=0))
    starts = {0, build.context_len - 1 - size}
    rows = [PlannedRow(0, start, (0,) * size, 0, (), sample=True, output_index=0) for start in sorted(starts)]
    return [StepPlan(0, (admission,), (row,)) for row in rows]


def _capture(runner: ModelRunner, device: torch.device) -> int:
    """Captures all graphs; returns the bytes that they take."""
    if runner.graphs is None:
        return 0
    free = _settled_free_bytes(device)
    with tqdm(desc="capturing graphs", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        runner.graphs.prepare(on_progress=show)
    return max(0, free - _settled_free_bytes(device))


def _warm_up(runner: ModelRunner) -> None:
    """A prompt and a decode step in the sink page, so that the first request finds libraries and kernels loaded."""
    admission = Admission(0, SamplingParams(max_tokens=2, seed=0, logprobs=1))
    prompt = PlannedRow(0, 0, (0, 0), 0, (0,), sample=True, output_index=0)
    decode = PlannedRow(0, 2, (0,), 1, (), sample=True, output_index=1)
    runner.launch(StepPlan(0, (admission,), (prompt,))).collect()
    runner.launch(StepPlan(0, (), (decode,))).collect()
