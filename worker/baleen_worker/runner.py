"""Executes step plans on the model. Owns the model, the pools, the page tables and each slot's sampling parameters.

`build_runner` makes one from a model folder. Nothing here knows of queues or clients. A launch puts a step's work on
the device, a collect brings its results to the host; on a CPU all work happens in the launch.

Legend: N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from baleen_worker import logit_processors
from baleen_worker.batch import Batch, LastTokens, PageTables, make_batch
from baleen_worker.cache.host_pool import CopyingRunner, HostPool, host_pages
from baleen_worker.cache.storage import (
    KvLayout,
    PagedPools,
    choose_layout,
    device_capacity_pages,
    host_capacity_pages,
)
from baleen_worker.logit_processors import LogitProcessorError, ProcessorContext, apply
from baleen_worker.logit_state import LogitState
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import ModelConfig, load_model_config
from baleen_worker.request import SamplingParams
from baleen_worker.sampler import SampleSpec, logprobs_of, sample
from baleen_worker.step import Admission, BuiltRunner, PlannedRow, StepOutput, StepPlan, TokenLogprobs
from baleen_worker.weights import LoadReport, fill_with_dummy_weights, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from baleen_worker.config import WorkerConfig
    from baleen_worker.logit_processors import LogitProcessor

# Logits that are held at a time (128 MiB of float32).
_MAX_LOGITS = 1 << 25
_MAX_CPU_THREADS = 16

logger = logging.getLogger(__name__)


def build_runner(config: WorkerConfig, *, on_progress: Callable[[int, int], None] | None = None) -> BuiltRunner:
    """Reads the model folder, loads the weights, takes memory for the pools and runs the model once.

    `on_progress` gets (bytes loaded, bytes in all). Raises ValueError, with a sentence for the operator, for whatever
    the folder, the device or its memory does not allow.
    """
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    model_config = load_model_config(config.model_dir, config.model_overrides)
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
    free_before = _free_bytes(device)
    model, report = _load_model(config, model_config, numerics, device, on_progress)
    context_len = min(config.context_length or math.inf, model_config.max_position_embeddings)
    num_pages = 1 + _capacity_pages(config, layout, device, free_before, int(context_len))
    pools = PagedPools(layout, num_pages, device=device, dtype=dtype)
    runner = ModelRunner(
        model,
        pools,
        max_running_requests=config.max_running_requests,
        context_len=int(context_len),
        page_size=config.page_size,
        device=device,
        logit_processors=logit_processors.load(dict(config.logit_processors)),
    )
    _warm_up(runner)
    num_host_pages, tiered = 0, runner
    if config.host_cache is not None:
        ratio, size_gb = config.host_cache.ratio, config.host_cache.size_gb
        num_host_pages = host_pages(layout, num_pages - 1, ratio=ratio, size_gb=size_gb)
        tiered = CopyingRunner(runner, HostPool(pools, num_host_pages))
    return BuiltRunner(
        runner=tiered,
        num_pages=num_pages,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        layout_id=layout.layout_id,
        weights_bytes=report.weights_bytes,
        kv_bytes=pools.num_bytes,
        computes_beside=device.type == "cuda",
        num_host_pages=num_host_pages,
    )


def empty_model(config: ModelConfig, numerics: Numerics, *, keep_fp8: bool) -> DeepseekForCausalLM:
    """The model without memory for its weights, which a loader then supplies."""
    with torch.device("meta"):
        return DeepseekForCausalLM(config, numerics, keep_fp8=keep_fp8)


class ModelRunner:
    """A `Runner` over a model with its weights and pools."""

    def __init__(
        self,
        model: DeepseekForCausalLM,
        pools: PagedPools,
        *,
        max_running_requests: int,
        context_len: int,
        page_size: int,
        device: torch.device,
        logit_processors: Mapping[str, LogitProcessor] | None = None,
    ) -> None:
        """Slots are below `max_running_requests`; no request has more than `context_len` tokens."""
        self._model = model
        self._pools = pools
        self._page_size = page_size
        self._device = device
        self._tables = PageTables(max_running_requests, math.ceil(context_len / page_size), device=device)
        self._logit_state = LogitState(max_running_requests, model.config.vocab_size, device)
        self._logit_processors = logit_processors or {}
        self._last_tokens = LastTokens(max_running_requests, device=device)
        self._max_rows = max(1, _MAX_LOGITS // model.config.vocab_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _ModelStep:
        """See `Runner`."""
        for admission in plan.admissions:
            self._logit_state.admit(admission)
        self._tables.extend(plan.rows)
        if not plan.rows:
            return _ModelStep(plan, [], [])
        batch = make_batch(plan.rows, self._tables, self._last_tokens, self._page_size)
        self._logit_state.follow(plan.rows, batch.starts, batch.input_ids)
        hidden = self._model(batch.input_ids, batch.context, self._pools)
        return _ModelStep(plan, list(self._sample(plan, batch, hidden)), list(self._score(plan, batch, hidden)))

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> Iterator[_Sampled]:
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.sample]
        for rows in _pieces(sampling_rows, self._max_rows):
            last = torch.tensor([batch.starts[row + 1] - 1 for row in rows], device=self._device)
            logits = self._model.compute_logits(hidden[last])  # [N, V]
            planned = [plan.rows[row] for row in rows]
            specs = [SampleSpec(self._logit_state.of(row.slot).sampling, row.output_index) for row in planned]
            token_ids, failures = self._choose(logits, planned, specs)
            self._last_tokens.keep(planned, token_ids)
            wanted = [place for place, spec in enumerate(specs) if spec.sampling.logprobs is not None]
            logprobs = None
            if wanted:
                num_top = [specs[place].sampling.logprobs or 0 for place in wanted]
                index = torch.tensor(wanted, device=self._device)
                described = logprobs_of(logits[index], token_ids[index], max(num_top))
                logprobs = _Logprobs([rows[place] for place in wanted], token_ids[index], num_top, *described)
            failed = {rows[place]: message for place, message in failures.items()}
            yield _Sampled(rows, logits.isfinite().all(-1), token_ids, logprobs, failed)

    def _choose(
        self, logits: Tensor, rows: Sequence[PlannedRow], specs: Sequence[SampleSpec]
    ) -> tuple[Tensor, dict[int, str]]:
        """logits [N, V] of the rows -> their tokens [N], and why some have none."""
        changed = self._logit_state.change(logits, rows)
        failures: dict[int, str] = {}
        for place, (row, spec) in enumerate(zip(rows, specs, strict=True)):
            if spec.sampling.logit_processors:
                try:
                    processed = self._process(changed[place].clone(), row.slot)
                except LogitProcessorError as error:
                    failures[place] = str(error)
                else:
                    changed = changed.index_put((torch.tensor(place, device=self._device),), processed)
        changed = self._logit_state.forbid(changed, rows)
        return self._logit_state.force(sample(changed, specs), rows), failures

    def _process(self, logits: Tensor, slot: int) -> Tensor:
        state = self._logit_state.of(slot)
        context = ProcessorContext(
            prompt_token_ids=tuple(state.token_ids[: state.num_prompt]),
            output_token_ids=tuple(state.token_ids[state.num_prompt :]),
        )
        for name in state.sampling.logit_processors:
            logits = apply(name, self._logit_processors[name], logits, context)
        return logits

    def _score(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> Iterator[_Scored]:
        for index, row in enumerate(plan.rows):
            num_top = self._logit_state.of(row.slot).sampling.prompt_logprobs or 0
            places = range(batch.starts[index], batch.starts[index] + len(row.score_token_ids))
            for piece in _pieces(places, self._max_rows):
                first = piece[0] - batch.starts[index]
                token_ids = torch.tensor(row.score_token_ids[first : first + len(piece)], device=self._device)
                logits = self._model.compute_logits(hidden[piece[0] : piece[-1] + 1])  # [N, V]
                rows = [index] * len(piece)
                described = logprobs_of(logits, token_ids, num_top)
                logprobs = _Logprobs(rows, token_ids, [num_top] * len(piece), *described)
                yield _Scored(index, logits.isfinite().all(), logprobs)


class _ModelStep:
    """A step whose results are still on the device."""

    def __init__(self, plan: StepPlan, sampled: Sequence[_Sampled], scored: Sequence[_Scored]) -> None:
        self._plan = plan
        self._sampled = sampled
        self._scored = scored

    def collect(self) -> StepOutput:
        """See `StepHandle`."""
        token_ids: list[list[int]] = [[] for _ in self._plan.rows]
        output = StepOutput(self._plan.step, token_ids)
        for piece in self._sampled:
            finite = piece.finite.tolist()
            for row, is_finite, token_id in zip(piece.rows, finite, piece.token_ids.tolist(), strict=True):
                token_ids[row].append(token_id)
                if not is_finite:
                    self._note_error(output, row)
            for row, message in piece.failed.items():
                output.errors.setdefault(row, message)
            if piece.logprobs is not None:
                piece.logprobs.add_to(output.logprobs)
        for piece in self._scored:
            piece.logprobs.add_to(output.prompt_logprobs)
            if not piece.finite.item():
                self._note_error(output, piece.row)
        for row in output.errors:
            token_ids[row] = []
            output.logprobs.pop(row, None)
            output.prompt_logprobs.pop(row, None)
        return output

    def _note_error(self, output: StepOutput, row: int) -> None:
        planned = self._plan.rows[row]
        last = planned.start + planned.num_tokens - 1
        output.errors[row] = f"the model's logits are not finite for positions {planned.start} to {last}"


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of N tokens: whose row, which token, how many alternatives are wanted, and what `logprobs_of` says."""

    rows: Sequence[int]
    token_ids: Tensor
    num_top: Sequence[int]
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def add_to(self, output: dict[int, TokenLogprobs]) -> None:
        """Appends each token's to those of its row."""
        columns = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)
        on_host = (column.tolist() for column in columns)
        for row, k, token_id, logprob, ids, values in zip(self.rows, self.num_top, *on_host, strict=True):
            described = output.setdefault(row, TokenLogprobs())
            described.token_ids.append(token_id)
            described.logprobs.append(logprob)
            described.top_token_ids.append(ids[:k])
            described.top_logprobs.append(values[:k])


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One token for each of N rows. finite [N] bool: whether a row's logits are. failed: rows and what broke there."""

    rows: Sequence[int]
    finite: Tensor
    token_ids: Tensor
    logprobs: _Logprobs | None
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Scored:
    """Consecutive given tokens of one row. finite: [] bool."""

    row: int
    finite: Tensor
    logprobs: _Logprobs


def _pieces(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this installation of PyTorch finds no CUDA device; use --device cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


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
    on_progress: Callable[[int, int], None] | None,
) -> tuple[DeepseekForCausalLM, LoadReport]:
    model = empty_model(model_config, numerics, keep_fp8=False)
    if _exceeds(model, device, config.mem_fraction_static) and model_config.quantization_config is not None:
        model = empty_model(model_config, numerics, keep_fp8=True)
        logger.info("keeping FP8 weights as stored: dequantised they would not fit the device")
    if config.load_format == "dummy":
        return model, fill_with_dummy_weights(model, device=device, seed=config.seed)
    report = load_weights(model, config.model_dir, model_config, device=device, on_progress=on_progress)
    logger.info(
        "loaded %d tensors, %.1f MiB; skipped %d tensors of multi-token-prediction layers",
        report.num_tensors,
        report.num_bytes_read / 2**20,
        report.num_mtp_tensors_skipped,
    )
    return model, report


def _exceeds(model: DeepseekForCausalLM, device: torch.device, mem_fraction_static: float) -> bool:
    """Whether the weights as described leave no memory for pages. A host may swap, and decides for itself."""
    if device.type == "cpu":
        return False
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return needed > mem_fraction_static * _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _capacity_pages(
    config: WorkerConfig, layout: KvLayout, device: torch.device, free_before: int, context_len: int
) -> int:
    if device.type == "cpu":
        useful_tokens = config.max_running_requests * context_len
        return host_capacity_pages(layout, max_total_tokens=config.max_total_tokens, useful_tokens=useful_tokens)
    return device_capacity_pages(
        layout,
        max_total_tokens=config.max_total_tokens,
        free_before=free_before,
        free_now=_free_bytes(device),
        mem_fraction_static=config.mem_fraction_static,
    )


def _warm_up(runner: ModelRunner) -> None:
    """A prompt and a decode step in the sink page, so that the first request finds libraries and kernels loaded."""
    admission = Admission(0, SamplingParams(max_tokens=2, seed=0, logprobs=1))
    prompt = PlannedRow(0, 0, (0, 0), 0, (0,), sample=True, output_index=0)
    decode = PlannedRow(0, 2, (0,), 1, (), sample=True, output_index=1)
    runner.launch(StepPlan(0, (admission,), (prompt,))).collect()
    runner.launch(StepPlan(0, (), (decode,))).collect()
