"""Drives a runner as a scheduler would, with random steps: order of admission, chunks, pages and batch mixes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import Admission, BuiltRunner, PlannedRow, StepOutput, StepPlan, TokenLogprobs

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZE = 64


@dataclass
class Sequence:
    """A request as a scheduler would drive it."""

    prompt: list[int]
    sampling: SamplingParams
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    prompt_logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is not None or len(self.output) == self.sampling.max_tokens


class Driver:
    """Runs sequences in random steps: random order of admission, chunk sizes, pages and batch mixes."""

    def __init__(self, built: BuiltRunner, seed: int, max_chunk: int = 48, num_slots: int = 6) -> None:
        self.built = built
        self.random = random.Random(seed)
        self.max_chunk = max_chunk
        self.free_pages = list(range(1, built.num_pages))
        self.random.shuffle(self.free_pages)
        self.free_slots = list(range(num_slots))
        self.step = 0

    def run(self, sequences: list[Sequence]) -> None:
        waiting, running = list(sequences), []
        while waiting or running:
            admissions = []
            while waiting and self.free_slots and (not running or self.random.random() < 0.5):
                sequence = waiting.pop(0)
                sequence.slot = self.free_slots.pop(self.random.randrange(len(self.free_slots)))
                admissions.append(self._admit(sequence))
                running.append(sequence)
            fresh = [s for s in running if s.computed == 0]
            chosen = [s for s in running if s in fresh or self.random.random() < 0.7] or running[:1]
            # Decodes first, as the scheduler orders them.
            chosen.sort(key=lambda s: s.computed < len(s.prompt))
            plan = StepPlan(self.step, admissions, [self._row(s) for s in chosen])
            self._commit(chosen, plan, self.built.runner.launch(plan).collect())
            for sequence in [s for s in running if s.finished]:
                running.remove(sequence)
                self.free_slots.append(sequence.slot)
                self.free_pages += sequence.pages
            self.step += 1

    def _admit(self, s: Sequence) -> Admission:
        if not s.sampling.needs_history:
            return Admission(s.slot, s.sampling)
        return Admission(s.slot, s.sampling, tuple(s.prompt + s.output), len(s.prompt))

    def _row(self, s: Sequence) -> PlannedRow:
        known = s.prompt + s.output
        limit = len(s.prompt) if s.computed < len(s.prompt) else len(known)
        end = min(limit, s.computed + self.random.randint(1, self.max_chunk))
        first_new_page = len(s.pages)
        while len(s.pages) * PAGE_SIZE < end:
            s.pages.append(self.free_pages.pop())
        scored: list[int] = []
        if s.sampling.prompt_logprobs is not None:
            scored = s.prompt[s.computed + 1 : end + 1]
        return PlannedRow(
            slot=s.slot,
            start=s.computed,
            token_ids=known[s.computed : end],
            first_new_page=first_new_page,
            new_pages=s.pages[first_new_page:],
            sample=end == len(known),
            output_index=len(s.output),
            score_token_ids=scored,
        )

    def _commit(self, chosen: list[Sequence], plan: StepPlan, output: StepOutput) -> None:
        assert output.step == plan.step
        for index, (s, row) in enumerate(zip(chosen, plan.rows, strict=True)):
            s.computed += len(row.token_ids)
            s.error = output.errors.get(index)
            assert len(output.token_ids[index]) == int(row.sample and s.error is None)
            s.output += output.token_ids[index]
            for target, found in ((s.logprobs, output.logprobs), (s.prompt_logprobs, output.prompt_logprobs)):
                if index in found:
                    target.token_ids += found[index].token_ids
                    target.logprobs += found[index].logprobs
                    target.top_token_ids += found[index].top_token_ids
                    target.top_logprobs += found[index].top_logprobs


def build(folder: Path, **options: object) -> BuiltRunner:
    config = {"dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "max_running_requests": 6}
    return build_runner(WorkerConfig(model_dir=folder, **{**config, **options}))  # type: ignore[arg-type]


def prompt(length: int, seed: int, vocab_size: int = 300) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)
