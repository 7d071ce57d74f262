"""The two halves of one engine step, as plain data: what the scheduler asks for and what the runner answers.

Nothing here imports torch, holds a device object, or refers to scheduler state, so a plan can be sent to several
ranks and executed by each in lockstep.

A *slot* is a row of the runner's persistent tables (page table, sampling parameters). The scheduler grants a slot when
a request starts to run and takes it back when the request leaves; slots are small integers below
`max_running_requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baleen_worker.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot: whatever the slot held before is void."""

    slot: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Tokens of one request to be computed in this step.

    `token_ids` sit at positions `start`, `start + 1`, …; keys of all earlier positions are already in the pages.
    `new_pages` extend the slot's page table from index `first_new_page`; position p lives in page `p // 64` of that
    table at offset `p % 64`.
    `sample` asks for the token that follows the last one; it is output number `output_index` of its request.
    `score_token_ids` asks for log-probabilities of given tokens: element i is scored by the logits at `start + i`.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    first_new_page: int
    new_pages: Sequence[int]
    sample: bool
    output_index: int
    score_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: admissions take effect before rows. Rows are decodes first, then prefill chunks."""

    step: int
    admissions: Sequence[Admission]
    rows: Sequence[PlannedRow]

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes, over all rows."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, before any sampling change (float32 log-softmax of the logits).

    `top_token_ids[i]` and `top_logprobs[i]` list the likeliest tokens at that place, likeliest first, lower id first
    among equals; empty where none were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What a step produced. `token_ids` is aligned with `plan.rows`: 0..k tokens a row.

    The other three are keyed by row index. A row in `errors` produced nothing: the message says what broke for it
    alone (non-finite logits, a page that is not its own); its neighbours stand.
    """

    step: int
    token_ids: list[list[int]]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class StepHandle(Protocol):
    """A step in flight."""

    def collect(self) -> StepOutput:
        """Waits for the step and returns its output. Called once."""
        ...


class Runner(Protocol):
    """Executes plans. Holds tensors and pages' contents; knows nothing of queues, budgets or clients.

    Computing a row again at the same positions rewrites the same page contents: the engine relies on it to find the
    one row that makes a step raise.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts the step; steps are collected in launch order."""
        ...
