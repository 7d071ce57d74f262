"""Executes step plans on the model. Owns the model, its pools and the per-slot tables on the device.

Knows nothing of queues, budgets or clients: see `step.Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baleen_worker.batch import ForwardBatch, PageTables
from baleen_worker.model.context import KvPools
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from baleen_worker.sampler import SamplingTable, sample, token_logprobs
from baleen_worker.step import StepHandle, StepOutput, StepPlan, TokenLogprobs

# Floats of logits held at a time when a prompt is scored (64 MiB).
_SCORE_CHUNK_ELEMENTS = 1 << 24


class ModelRunner:
    """One rank's model. Legend: N rows that sample, V vocabulary."""

    def __init__(
        self,
        model: DeepseekForCausalLM,
        pools: KvPools,
        *,
        max_running_requests: int,
        context_length: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pools = pools
        self._device = device
        self._page_tables = PageTables(
            max_running_requests, -(-context_length // page_size), page_size=page_size, device=device
        )
        self._sampling = SamplingTable(max_running_requests)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """See `step.Runner.launch`."""
        for admission in plan.admissions:
            self._sampling.set(admission.slot, admission.sampling)
        batch = self._page_tables.batch(plan)
        hidden = self._model(batch.input_ids, batch.context, self._pools)  # [T, hidden]
        sampled = self._sample(plan, batch, hidden)
        return _Launched(plan, sampled, self._score(plan, batch, hidden))

    def _sample(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> _Sampled | None:
        indices = [index for index, row in enumerate(plan.rows) if row.sample]
        if not indices:
            return None
        rows = [plan.rows[index] for index in indices]
        last = [batch.starts[index] + len(row.token_ids) - 1 for index, row in zip(indices, rows, strict=True)]
        logits = self._model.compute_logits(hidden[self._ids(last)])  # [N, V]
        finite = logits.isfinite().all(-1)
        # A broken row must not break the arithmetic of the others; what it would sample is thrown away.
        logits = torch.where(finite[:, None], logits, 0.0)
        parameters = self._sampling.gather([row.slot for row in rows], [row.output_index for row in rows])
        token_ids = sample(logits, parameters)
        wanted = [self._sampling.num_top_logprobs(row.slot) for row in rows]
        asking = [place for place, count in enumerate(wanted) if count is not None]
        logprobs: dict[int, TokenLogprobs] = {}
        if asking:
            at = self._ids(asking)
            records = token_logprobs(logits[at], token_ids[at], [wanted[place] or 0 for place in asking])
            logprobs = {indices[place]: record for place, record in zip(asking, records, strict=True)}
        return _Sampled(indices, token_ids, finite, logprobs)

    def _score(self, plan: StepPlan, batch: ForwardBatch, hidden: Tensor) -> dict[int, TokenLogprobs]:
        """Log-probabilities of given tokens, for rows that are scored, in pieces that bound the logits' memory."""
        scored: dict[int, TokenLogprobs] = {}
        step = max(1, _SCORE_CHUNK_ELEMENTS // self._model.config.vocab_size)
        for index, row in enumerate(plan.rows):
            if not row.score_token_ids:
                continue
            targets, start = list(row.score_token_ids), batch.starts[index]
            num_top = self._sampling.num_top_prompt_logprobs(row.slot)
            record = scored[index] = TokenLogprobs()
            for first in range(0, len(targets), step):
                some = targets[first : first + step]
                logits = self._model.compute_logits(hidden[start + first : start + first + len(some)])
                for piece in token_logprobs(logits, self._ids(some), [num_top] * len(some)):
                    record.token_ids += piece.token_ids
                    record.logprobs += piece.logprobs
                    record.top_token_ids += piece.top_token_ids
                    record.top_logprobs += piece.top_logprobs
        return scored

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """indices: rows of the plan that sampled. token_ids, finite: [N] on the device."""

    indices: Sequence[int]
    token_ids: Tensor
    finite: Tensor
    logprobs: dict[int, TokenLogprobs]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results are still on the device; reading them waits for it."""

    plan: StepPlan
    sampled: _Sampled | None
    prompt_logprobs: dict[int, TokenLogprobs]

    def collect(self) -> StepOutput:
        """See `step.StepHandle.collect`."""
        output = StepOutput(self.plan.step, [[] for _ in self.plan.rows], prompt_logprobs=self.prompt_logprobs)
        if self.sampled is None:
            return output
        results = zip(self.sampled.indices, self.sampled.token_ids.tolist(), self.sampled.finite.tolist(), strict=True)
        for index, token_id, finite in results:
            if finite:
                output.token_ids[index] = [token_id]
            else:
                output.errors[index] = "the model's output for this request is not finite"
        output.logprobs = {
            index: record for index, record in self.sampled.logprobs.items() if index not in output.errors
        }
        return output
