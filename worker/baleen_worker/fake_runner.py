"""A runner without a model that certifies everything around it. Needs no torch.

Its language model is a hash: the state after a token is `mix(state before, token)`, and output i is a hash of the
state after the last token fed and of i. A token that is lost, doubled or foreign therefore changes all that follow,
and `expected_tokens` says what must come out. The states live in pages, each tagged with its place and with those in
whose tables it is, and a row reads its last state from there, as attention would. So a page that is foreign, stale,
granted twice, given back too early or never written is found when it is used, and the row fails with a sentence that
says which it was.

A row's mask moves its token to the next one that is allowed.

Pages that a slot starts from, because an earlier request has computed the same tokens, must be full, in their place,
and each begin with the very state that the one before it ends with. A chain of pages that is sound but spells another
prompt gives other tokens.

A step costs O(tokens fed): one page of a row's table is checked again in turn at each step, all of them at the end of
its prompt and at its last token. That a page was granted to somebody else is known at once, whatever its place: the
grant marks the former owners.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from baleen_worker.fake_pages import PAGE_SIZE, START_STATE, FakePages, FakePageStore, Owner, ViolationError
from baleen_worker.grammar.guide import first_allowed
from baleen_worker.step import BuiltRunner, CopyError, PlannedRow, StepOutput, StepPlan, TokenLogprobs
from baleen_worker.step_columns import OneTokenEach, PlannedRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baleen_worker.fake_script import FakeScript
    from baleen_worker.step import PageStore

_MASK = (1 << 64) - 1
_DEFAULT_CAPACITY_TOKENS = 1 << 20
EXIT_OF_DEATH = 70


def expected_tokens(
    prompt_ids: Sequence[int], num_tokens: int, vocab_size: int, *, avoid_ids: Iterable[int] = ()
) -> list[int]:
    """What the fake runner answers to a prompt, `num_tokens` long. `avoid_ids` (the model's end ids) never occur."""
    avoid = frozenset(avoid_ids)
    state = START_STATE
    for token_id in prompt_ids:
        state = _mix(state, token_id)
    output: list[int] = []
    for index in range(num_tokens):
        token_id = _choose(state, index, vocab_size, avoid)
        output.append(token_id)
        state = _mix(state, token_id)
    return output


def expected_logprob(context_ids: Sequence[int], token_id: int) -> float:
    """The log-probability that the fake runner states for `token_id` after `context_ids`."""
    state = START_STATE
    for context_id in context_ids:
        state = _mix(state, context_id)
    return _logprob(state, token_id)


def expected_logprobs(context_ids: Sequence[int], first: int) -> list[float]:
    """`expected_logprob` of each token from place `first` of a context on, after all before it."""
    state = START_STATE
    logprobs: list[float] = []
    for place, token_id in enumerate(context_ids):
        if place >= first:
            logprobs.append(_logprob(state, token_id))
        state = _mix(state, token_id)
    return logprobs


def build_fake_runner(
    *,
    vocab_size: int,
    avoid_ids: Iterable[int],
    max_total_tokens: int | None,
    step_ms: float,
    poison_token_id: int | None,
    deadly_token_id: int | None,
    script: FakeScript | None,
    host_ratio: float = 0.0,
) -> BuiltRunner:
    """The fake runner as the rank process uses it; pages for a million tokens when no number is given.

    `host_ratio`: pages in host memory for each other page.
    """
    num_pages = (max_total_tokens or _DEFAULT_CAPACITY_TOKENS) // PAGE_SIZE + 1
    num_host_pages = round(host_ratio * (num_pages - 1))
    runner = FakeRunner(
        num_pages,
        vocab_size,
        num_host_pages=num_host_pages,
        avoid_ids=avoid_ids,
        step_ms=step_ms,
        poison_token_id=poison_token_id,
        deadly_token_id=deadly_token_id,
        script=script,
    )
    return BuiltRunner(
        runner=runner,
        num_pages=num_pages,
        device="cpu",
        dtype="float32",
        layout_id="fake",
        weights_bytes=0,
        kv_bytes=0,
        poison=runner.poison,
        computes_beside=True,
        num_host_pages=num_host_pages,
        page_store=runner.page_store,
    )


class FakeRunner:
    """Executes plans on tagged pages; see the module.

    `step_ms`: how long a step takes, 0 for no time. `eos_after`: (output index, token id) to say from that index on.
    `poison_token_id`: a prompt that holds it makes its step raise, in `collect` when `poison_in_collect`, else in
    `launch` after half of its effects. `deadly_token_id`: a prompt that begins with it ends the process, as a
    fault of a device would.
    `script`: answers to replay; its own tokens follow where one ends without an end-of-sequence id.
    """

    def __init__(
        self,
        num_pages: int,
        vocab_size: int,
        *,
        avoid_ids: Iterable[int] = (),
        step_ms: float = 0.0,
        eos_after: tuple[int, int] | None = None,
        poison_token_id: int | None = None,
        poison_in_collect: bool = False,
        deadly_token_id: int | None = None,
        script: FakeScript | None = None,
        num_host_pages: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._avoid_ids = frozenset(avoid_ids)
        self._step_s = step_ms / 1000
        self._eos_after = eos_after
        self._poison_token_id = poison_token_id
        self._poison_in_collect = poison_in_collect
        self._deadly_token_id = deadly_token_id
        self._script = script
        self._pages = FakePages(num_pages, num_host_pages)

    @property
    def page_store(self) -> PageStore:
        """The pages as bytes."""
        return FakePageStore(self._pages)

    def poison(self, pages: Sequence[int]) -> None:
        """The pages are free: nobody may read them any more. For `PagePool`'s `on_free`."""
        self._pages.poison(pages)

    def launch(self, plan: StepPlan) -> _FakeStep:
        """Copies pages and binds slots now, as a device's tables would be; tokens are computed by `collect`."""
        try:
            self._pages.copy(plan.copies)
        except ViolationError as violation:
            raise CopyError(str(violation)) from None
        for admission in plan.admissions:
            if not admission.resumes:
                self._pages.admit(admission.slot, admission.sampling)
        bound: list[tuple[Owner | None, str | None]] = []
        for row in plan.rows:
            owner = self._pages.owner_of(row.slot)
            problem = "its slot was never granted" if owner is None else self._pages.bind(owner, row)
            bound.append((owner, problem))
            if not self._poison_in_collect:
                self._raise_if_poisoned(row)
        return _FakeStep(self, plan, bound, time.monotonic() + self._step_s)

    def execute(self, plan: StepPlan, bound: Sequence[tuple[Owner | None, str | None]], ready_s: float) -> StepOutput:
        """Computes a launched step, at the earliest at `ready_s` of the monotonic clock."""
        tokens: list[list[int]] = []
        output = StepOutput(plan.step, tokens)
        for index, (row, (owner, problem)) in enumerate(zip(plan.rows, bound, strict=True)):
            if self._poison_in_collect:
                self._raise_if_poisoned(row)
            token_ids: list[int] = []
            try:
                if owner is None or problem is not None:
                    raise ViolationError(problem)
                token_ids = self._compute(owner, row, output, index)
            except ViolationError as violation:
                output.errors[index] = f"slot {row.slot}, position {row.start}: {violation}"
            tokens.append(token_ids)
        if isinstance(plan.rows, PlannedRows) and all(len(token_ids) == 1 for token_ids in tokens):
            output.token_ids = OneTokenEach(np.fromiter((token_id for [token_id] in tokens), np.int64, len(tokens)))
        if self._step_s:
            time.sleep(max(ready_s - time.monotonic(), 0))
        return output

    def _raise_if_poisoned(self, row: PlannedRow) -> None:
        if row.start == 0 and self._deadly_token_id is not None and row.token_ids[0] == self._deadly_token_id:
            os._exit(EXIT_OF_DEATH)
        if self._poison_token_id is not None and row.output_index == 0 and self._poison_token_id in row.token_ids:
            raise RuntimeError(f"the fake runner was fed its poison, token {self._poison_token_id}")

    def _compute(self, owner: Owner, row: PlannedRow, output: StepOutput, index: int) -> list[int]:
        start = row.start
        token_ids = self._check_row(owner, row)
        state = START_STATE if start == 0 else self._pages.state_at(owner, start - 1)
        before = state
        states = [state := _mix(state, token_id) for token_id in token_ids]
        self._pages.write(owner, start, before, states)
        if self._script is not None:
            self._pages.write_ids(owner, start, token_ids)
        end = owner.computed(start, len(token_ids))

        if row.score_token_ids:
            scored = zip(row.score_token_ids, states, strict=False)
            num_top = owner.sampling.prompt_logprobs or 0
            output.prompt_logprobs[index] = self._describe(scored, num_top)
        if not row.sample:
            return []
        if owner.num_prompt is None:
            owner.num_prompt = end - row.output_index
            if self._script is not None:
                owner.answer = self._script.answer_to(self._pages.ids(owner, owner.num_prompt))
        is_last = row.output_index + 1 == owner.sampling.max_tokens
        if is_last or row.output_index == 0:
            for place in range(-(-end // PAGE_SIZE)):
                self._pages.check_page(owner, place, end)
        token_id = self._sample(owner, state, row)
        if row.mask:
            token_id = first_allowed(row.mask, token_id, self._vocab_size)
        owner.sampled[end] = token_id
        if owner.sampling.logprobs is not None:
            output.logprobs[index] = self._describe([(token_id, state)], owner.sampling.logprobs)
        return [token_id]

    def _check_row(self, owner: Owner, row: PlannedRow) -> Sequence[int]:
        """The row's tokens. It goes on where the last one ended, with the token sampled; or repeats a recent one."""
        if owner.lost is not None:
            raise ViolationError(owner.lost)
        start, token_ids = row.start, row.token_ids
        if start != owner.next_start and start not in owner.recent_starts:
            raise ViolationError(f"position {owner.next_start} was due")
        sampled = owner.sampled.get(start)
        if row.from_device:
            if sampled is None or token_ids:
                raise ViolationError("it takes a token from the device that was not sampled")
            token_ids = (sampled,)
        if start + len(token_ids) > len(owner.table) * PAGE_SIZE:
            raise ViolationError(f"its {len(owner.table)} pages do not hold the row")
        if sampled is not None and token_ids[0] != sampled:
            raise ViolationError(f"token {token_ids[0]} was fed where {sampled} was sampled")
        if row.sample and owner.num_prompt is not None:
            due = start + len(token_ids) - owner.num_prompt
            if row.output_index != due:
                raise ViolationError(f"output {row.output_index} is asked for where {due} is due")
        if start > 0:
            owner.next_check = (owner.next_check + 1) % -(-start // PAGE_SIZE)
            self._pages.check_page(owner, owner.next_check, start)
        return token_ids

    def _sample(self, owner: Owner, state: int, row: PlannedRow) -> int:
        if owner.answer is not None and row.output_index < len(owner.answer):
            return owner.answer[row.output_index]
        if self._eos_after is not None and row.output_index >= self._eos_after[0]:
            return self._eos_after[1]
        return _choose(state, row.output_index, self._vocab_size, self._avoid_ids)

    def _describe(self, scored: Iterable[tuple[int, int]], num_top: int) -> TokenLogprobs:
        logprobs = TokenLogprobs()
        for token_id, state in scored:
            logprobs.token_ids.append(token_id)
            logprobs.logprobs.append(_logprob(state, token_id))
            candidates = [(state + offset) % self._vocab_size for offset in range(num_top)]
            top = sorted((-_logprob(state, candidate), candidate) for candidate in candidates)
            logprobs.top_token_ids.append([candidate for _, candidate in top])
            logprobs.top_logprobs.append([-negated for negated, _ in top])
        return logprobs


class _FakeStep:
    def __init__(
        self,
        runner: FakeRunner,
        plan: StepPlan,
        bound: Sequence[tuple[Owner | None, str | None]],
        ready_s: float,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._bound = bound
        self._ready_s = ready_s

    def collect(self) -> StepOutput:
        bound, self._bound = self._bound, ()
        return self._runner.execute(self._plan, bound, self._ready_s)


def _mix(state: int, token_id: int) -> int:
    state = ((state ^ (token_id + 1)) * 0xFF51AFD7ED558CCD) & _MASK
    return state ^ (state >> 29)


def _choose(state: int, output_index: int, vocab_size: int, avoid_ids: frozenset[int]) -> int:
    token_id = _mix(state, output_index) % vocab_size
    while token_id in avoid_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _logprob(state: int, token_id: int) -> float:
    return -(_mix(state, token_id) % 8000 + 1) / 1000
