"""Executes step plans on the model. Owns the model, the pools, the page tables and each slot's sampling parameters.

`runner` makes one from a model folder. Nothing here knows of queues or clients. A launch puts a step's work on
the device, a collect brings its results to the host; on a CPU all work happens in the launch. Nothing in a launch waits
for the device, plugins and lists of alternatives apart.

Legend: N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from baleen_kernels import sample as sample_op
from baleen_kernels.mask_logits import mask_logits

from baleen_worker.batch import Batch, LastTokens, PageTables, make_batch
from baleen_worker.decode_graphs import Capture, DecodeGraphs
from baleen_worker.logit_processors import LogitProcessorError, ProcessorContext, apply
from baleen_worker.logit_state import LogitState
from baleen_worker.model.fused.model import FusedModel
from baleen_worker.sampler import SampleSpec, logprobs_of, sample
from baleen_worker.staging import Fetch, list_to_device, raise_if_lost
from baleen_worker.step import PlannedRow, StepOutput, StepPlan, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from baleen_worker.cache.storage import PagedPools
    from baleen_worker.logit_processors import LogitProcessor
    from baleen_worker.model.context import ForwardContext
    from baleen_worker.model_config import ModelConfig

# Logits that are held at a time (128 MiB of float32).
_MAX_LOGITS = 1 << 25


class Model(Protocol):
    """What a runner needs of a model, plain or fused."""

    config: ModelConfig

    def __call__(self, input_ids: Tensor, context: ForwardContext, pools: PagedPools) -> Tensor:
        """input_ids [T] int64 -> hidden states [T, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> logits [N, V] float32."""
        ...


class ModelRunner:
    """A `Runner` over a model with its weights and pools."""

    def __init__(
        self,
        model: Model,
        pools: PagedPools,
        *,
        max_running_requests: int,
        context_len: int,
        page_size: int,
        device: torch.device,
        logit_processors: Mapping[str, LogitProcessor] | None = None,
        capture: Capture | None = None,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """Slots are below `max_running_requests`; no request has more than `context_len` tokens.

        `capture`: decode steps of a fused model, padded to the next of `graph_sizes`, become graphs.
        """
        self._model = model
        self._pools = pools
        self._page_size = page_size
        self._device = device
        self._tables = PageTables(max_running_requests, math.ceil(context_len / page_size), device=device)
        fused = isinstance(model, FusedModel)
        self._sample_op = model.ops.sample if fused else sample_op.sample
        mask = model.ops.mask_logits if fused else mask_logits
        self._logit_state = LogitState(max_running_requests, model.config.vocab_size, device, mask=mask)
        self._logit_processors = logit_processors or {}
        self._last_tokens = LastTokens(max_running_requests, device=device)
        self._max_rows = max(1, _MAX_LOGITS // model.config.vocab_size)
        self.graphs: DecodeGraphs | None = None
        if capture is not None and graph_sizes:
            assert isinstance(model, FusedModel)
            self.graphs = DecodeGraphs(
                model,
                pools,
                self._tables,
                self._last_tokens,
                sizes=graph_sizes,
                page_size=page_size,
                capture=capture,
            )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _ModelStep:
        """See `Runner`."""
        try:
            return self._launch(plan)
        except RuntimeError as error:
            raise_if_lost(self._device, error)
            raise

    def _launch(self, plan: StepPlan) -> _ModelStep:
        plan = msgspec.structs.replace(plan, rows=list(plan.rows))
        for admission in plan.admissions:
            self._logit_state.admit(admission)
        self._tables.extend(plan.rows)
        fetch = Fetch(self._device)
        if not plan.rows:
            return _ModelStep(plan, [], [], fetch)
        if self.graphs is not None and self.graphs.takes(plan.rows):
            return self._launch_graph(plan, self.graphs, fetch)
        batch = make_batch(plan.rows, self._tables, self._last_tokens, self._page_size)
        self._logit_state.follow(plan.rows, batch.starts, batch.input_ids)
        hidden = self._model(batch.input_ids, batch.context, self._pools)
        sampled = [piece.fetched(fetch) for piece in self._sample(plan, batch, hidden)]
        scored = [piece.fetched(fetch) for piece in self._score(plan, batch, hidden)]
        fetch.close()
        return _ModelStep(plan, sampled, scored, fetch)

    def _launch_graph(self, plan: StepPlan, graphs: DecodeGraphs, fetch: Fetch) -> _ModelStep:
        rows, specs = plan.rows, self._specs(plan.rows)
        if any(spec.sampling.needs_history for spec in specs):
            self._follow_singles(rows)
        decoded = graphs.decode(rows)
        token_ids, told, failures = decoded.token_ids, decoded.told_token_ids, {}
        if not all(_leaves_logits(row, spec) for row, spec in zip(rows, specs, strict=True)):
            token_ids, failures = self._choose(decoded.logits, rows, specs)
            self._last_tokens.keep(rows, token_ids)
        elif any(spec.sampling.temperature > 0 for spec in specs):
            token_ids = graphs.sample(specs)
        if token_ids is not decoded.token_ids:
            told = fetch.take(token_ids)
        places = range(len(rows))
        logprobs = self._describe(decoded.logits, token_ids, places, specs)
        fetched = None if logprobs is None else logprobs.fetched(fetch)
        fetch.close()
        graphs.until(fetch)
        return _ModelStep(plan, [_Sampled(places, decoded.told_finite, told, fetched, failures)], [], fetch)

    def _follow_singles(self, rows: Sequence[PlannedRow]) -> None:
        """Takes in the tokens of rows of one token, which a graph keeps to itself; call before it is launched."""
        fed = self._on_device([row.token_ids[0] if row.token_ids else 0 for row in rows])
        starts = range(len(rows) + 1)
        self._last_tokens.fill(rows, starts, fed)
        self._logit_state.follow(rows, starts, fed)

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> Iterator[_Sampled]:
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.sample]
        for rows in _pieces(sampling_rows, self._max_rows):
            last = self._on_device([batch.starts[row + 1] - 1 for row in rows])
            logits = self._model.compute_logits(hidden[last])  # [N, V]
            planned = [plan.rows[row] for row in rows]
            specs = self._specs(planned)
            token_ids, failures = self._choose(logits, planned, specs)
            self._last_tokens.keep(planned, token_ids)
            logprobs = self._describe(logits, token_ids, rows, specs)
            failed = {rows[place]: message for place, message in failures.items()}
            yield _Sampled(rows, logits.isfinite().all(-1), token_ids, logprobs, failed)

    def _specs(self, rows: Sequence[PlannedRow]) -> list[SampleSpec]:
        return [SampleSpec(self._logit_state.of(row.slot).sampling, row.output_index) for row in rows]

    def _describe(
        self, logits: Tensor, token_ids: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]
    ) -> _Logprobs | None:
        """Of the rows that ask for log-probabilities."""
        wanted = [place for place, spec in enumerate(specs) if spec.sampling.logprobs is not None]
        if not wanted:
            return None
        num_top = [specs[place].sampling.logprobs or 0 for place in wanted]
        index = self._on_device(wanted)
        described = logprobs_of(logits[index], token_ids[index], max(num_top))
        return _Logprobs([rows[place] for place in wanted], token_ids[index], num_top, *described)

    def _on_device(self, values: Sequence[int]) -> Tensor:
        return list_to_device(values, torch.int64, self._device)

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
                    changed = changed.index_put((self._on_device([place])[0],), processed)
        changed = self._logit_state.forbid(changed, rows)
        return self._logit_state.force(sample(changed, specs, choose=self._sample_op), rows), failures

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
                token_ids = self._on_device(row.score_token_ids[first : first + len(piece)])
                logits = self._model.compute_logits(hidden[piece[0] : piece[-1] + 1])  # [N, V]
                rows = [index] * len(piece)
                described = logprobs_of(logits, token_ids, num_top)
                logprobs = _Logprobs(rows, token_ids, [num_top] * len(piece), *described)
                yield _Scored(index, logits.isfinite().all(), logprobs)


class _ModelStep:
    """A step whose results are on their way to the host."""

    def __init__(self, plan: StepPlan, sampled: Sequence[_Sampled], scored: Sequence[_Scored], fetch: Fetch) -> None:
        self._plan = plan
        self._sampled = sampled
        self._scored = scored
        self._fetch = fetch

    def collect(self) -> StepOutput:
        """See `StepHandle`."""
        try:
            self._fetch.wait()
        except RuntimeError as error:
            raise_if_lost(self._fetch.device, error)
            raise
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

    def fetched(self, fetch: Fetch) -> _Logprobs:
        """The same on the host, once `fetch` has come."""
        columns = self.token_ids, self.logprobs, self.top_ids, self.top_logprobs
        token_ids, *described = (fetch.take(column) for column in columns)
        return _Logprobs(self.rows, token_ids, self.num_top, *described)

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

    def fetched(self, fetch: Fetch) -> _Sampled:
        """The same on the host, once `fetch` has come."""
        logprobs = None if self.logprobs is None else self.logprobs.fetched(fetch)
        return _Sampled(self.rows, fetch.take(self.finite), fetch.take(self.token_ids), logprobs, self.failed)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Consecutive given tokens of one row. finite: [] bool."""

    row: int
    finite: Tensor
    logprobs: _Logprobs

    def fetched(self, fetch: Fetch) -> _Scored:
        """The same on the host, once `fetch` has come."""
        return _Scored(self.row, fetch.take(self.finite), self.logprobs.fetched(fetch))


def _pieces(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _leaves_logits(row: PlannedRow, spec: SampleSpec) -> bool:
    """Whether the row's token is chosen from the model's own logits."""
    sampling = spec.sampling
    return not (sampling.logit_bias or sampling.min_tokens or sampling.needs_history or row.mask)
