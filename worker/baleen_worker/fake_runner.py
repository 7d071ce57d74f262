"""A runner without a model that certifies everything around it. Needs no torch.

Its language model is a hash: the state after a token is `mix(state before, token)`, and output i is a hash of the
state after the last token fed and of i. A token that is lost, doubled or foreign therefore changes all that follow,
and `expected_tokens` says what must come out. The states live in pages, each tagged with its owner and its place in
the owner's table, and a row reads its last state from there, as attention would. So a page that is foreign, stale,
granted twice, given back too early or never written is found when it is used, and the row fails with a sentence that
says which it was.

A step costs O(tokens fed): one page of a row's table is checked again in turn at each step, all of them at the end of
its prompt and at its last token. That a page was granted to somebody else is known at once, whatever its place: the
grant marks the former owner.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from baleen_worker.step import BuiltRunner, PlannedRow, StepOutput, StepPlan, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baleen_worker.fake_script import FakeScript
    from baleen_worker.request import SamplingParams

PAGE_SIZE = 64

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_DEFAULT_CAPACITY_TOKENS = 1 << 20


def expected_tokens(
    prompt_ids: Sequence[int], num_tokens: int, vocab_size: int, *, avoid_ids: Iterable[int] = ()
) -> list[int]:
    """What the fake runner answers to a prompt, `num_tokens` long. `avoid_ids` (the model's end ids) never occur."""
    avoid = frozenset(avoid_ids)
    state = _START
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
    state = _START
    for context_id in context_ids:
        state = _mix(state, context_id)
    return _logprob(state, token_id)


def build_fake_runner(
    *,
    vocab_size: int,
    avoid_ids: Iterable[int],
    max_total_tokens: int | None,
    step_ms: float,
    poison_token_id: int | None,
    script: FakeScript | None,
) -> BuiltRunner:
    """The fake runner as the rank process uses it; pages for a million tokens when no number is given."""
    num_pages = (max_total_tokens or _DEFAULT_CAPACITY_TOKENS) // PAGE_SIZE + 1
    runner = FakeRunner(
        num_pages,
        vocab_size,
        avoid_ids=avoid_ids,
        step_ms=step_ms,
        poison_token_id=poison_token_id,
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
    )


class FakeRunner:
    """Executes plans on tagged pages; see the module.

    `step_ms`: how long a step takes, 0 for no time. `eos_after`: (output index, token id) to say from that index on.
    `poison_token_id`: a prompt that holds it makes its step raise, in `collect` when `poison_in_collect`, else in
    `launch` after half of its effects. `script`: answers to replay; its own tokens follow where one ends
    without an end-of-sequence id.
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
        script: FakeScript | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._avoid_ids = frozenset(avoid_ids)
        self._step_s = step_ms / 1000
        self._eos_after = eos_after
        self._poison_token_id = poison_token_id
        self._poison_in_collect = poison_in_collect
        self._script = script
        self._pages: list[_Page] = [_Page() for _ in range(num_pages)]
        self._owners: dict[int, _Owner] = {}

    def launch(self, plan: StepPlan) -> _FakeStep:
        """Binds slots and pages now, as a device's tables would be; tokens are computed by `collect`."""
        for admission in plan.admissions:
            self._owners[admission.slot] = _Owner(admission.sampling)
        bound: list[tuple[_Owner | None, str | None]] = []
        for row in plan.rows:
            owner = self._owners.get(row.slot)
            problem = "its slot was never granted" if owner is None else self._bind(owner, row)
            bound.append((owner, problem))
            if not self._poison_in_collect:
                self._raise_if_poisoned(row)
        return _FakeStep(self, plan, bound, time.monotonic() + self._step_s)

    def execute(self, plan: StepPlan, bound: Sequence[tuple[_Owner | None, str | None]], ready_s: float) -> StepOutput:
        """Computes a launched step, at the earliest at `ready_s` of the monotonic clock."""
        output = StepOutput(plan.step, [])
        for index, (row, (owner, problem)) in enumerate(zip(plan.rows, bound, strict=True)):
            if self._poison_in_collect:
                self._raise_if_poisoned(row)
            token_ids: list[int] = []
            try:
                if owner is None or problem is not None:
                    raise _ViolationError(problem)
                token_ids = self._compute(owner, row, output, index)
            except _ViolationError as violation:
                output.errors[index] = f"slot {row.slot}, position {row.start}: {violation}"
            output.token_ids.append(token_ids)
        if self._step_s:
            time.sleep(max(ready_s - time.monotonic(), 0))
        return output

    def _raise_if_poisoned(self, row: PlannedRow) -> None:
        if self._poison_token_id is not None and row.output_index == 0 and self._poison_token_id in row.token_ids:
            raise RuntimeError(f"the fake runner was fed its poison, token {self._poison_token_id}")

    def _bind(self, owner: _Owner, row: PlannedRow) -> str | None:
        """Extends the owner's page table; returns what is wrong with the grant."""
        if row.first_new_page > len(owner.table):
            return f"its table has {len(owner.table)} pages and is extended from {row.first_new_page}"
        for place, number in enumerate(row.new_pages, row.first_new_page):
            if not 0 < number < len(self._pages):
                return f"page {number} is the sink or does not exist"
            if place < len(owner.table):
                if owner.table[place] != number:  # only a repeated row may name pages again, and the same ones
                    return f"page {owner.table[place]} of its table is replaced by {number}"
                continue
            page = self._pages[number]
            if page.owner is owner:
                return f"page {number} is granted to it twice"
            if page.owner is not None:
                page.owner.lost_page = number
            page.owner = owner
            page.place = place
            page.states = []
            page.token_ids = []
            owner.table.append(number)
        return None

    def _compute(self, owner: _Owner, row: PlannedRow, output: StepOutput, index: int) -> list[int]:
        start, token_ids = row.start, row.token_ids
        self._check_row(owner, row)
        state = _START if start == 0 else self._state_at(owner, start - 1)
        states = [state := _mix(state, token_id) for token_id in token_ids]
        self._write(owner, start, states)
        if self._script is not None:
            self._write_ids(owner, start, token_ids)
        owner.last_start, owner.next_start = start, start + len(token_ids)

        if row.score_token_ids:
            scored = zip(row.score_token_ids, states, strict=False)
            num_top = owner.sampling.prompt_logprobs or 0
            output.prompt_logprobs[index] = self._describe(scored, num_top)
        if not row.sample:
            return []
        is_last = row.output_index + 1 == owner.sampling.max_tokens
        if is_last or row.output_index == 0:
            for place in range(len(owner.table)):
                self._check_page(owner, place, start + len(token_ids))
        if self._script is not None and row.output_index == 0:
            owner.answer = self._script.answer_to(self._prompt_ids(owner, start + len(token_ids)))
        token_id = self._sample(owner, state, row.output_index)
        owner.sampled = (owner.next_start, token_id)
        owner.num_sampled = row.output_index + 1
        if owner.sampling.logprobs is not None:
            output.logprobs[index] = self._describe([(token_id, state)], owner.sampling.logprobs)
        return [token_id]

    def _check_row(self, owner: _Owner, row: PlannedRow) -> None:
        """A row continues where the last one ended, with the token that was sampled; or it repeats the last one."""
        if owner.lost_page is not None:
            raise _ViolationError(f"its page {owner.lost_page} was granted to another request")
        start = row.start
        repeats = start == owner.last_start
        if start != owner.next_start and not repeats:
            raise _ViolationError(f"position {owner.next_start} was due")
        if start + len(row.token_ids) > len(owner.table) * PAGE_SIZE:
            raise _ViolationError(f"its {len(owner.table)} pages do not hold the row")
        if owner.sampled is not None and owner.sampled[0] == start and row.token_ids[0] != owner.sampled[1]:
            raise _ViolationError(f"token {row.token_ids[0]} was fed where {owner.sampled[1]} was sampled")
        if row.sample and owner.num_sampled is not None and row.output_index != owner.num_sampled - repeats:
            raise _ViolationError(f"output {row.output_index} is asked for where {owner.num_sampled} is due")
        if start > 0:
            owner.next_check = (owner.next_check + 1) % len(owner.table)
            self._check_page(owner, owner.next_check, start)

    def _check_page(self, owner: _Owner, place: int, num_computed: int) -> None:
        """The page at `place` is the owner's, and holds the positions below `num_computed` that fall into it."""
        page = self._pages[owner.table[place]]
        if page.owner is not owner or page.place != place:
            raise _ViolationError(f"page {owner.table[place]} is not its page {place}")
        if len(page.states) < min(num_computed - place * PAGE_SIZE, PAGE_SIZE):
            raise _ViolationError(f"page {owner.table[place]} lacks positions that were computed")

    def _state_at(self, owner: _Owner, position: int) -> int:
        place, offset = divmod(position, PAGE_SIZE)
        self._check_page(owner, place, position + 1)
        return self._pages[owner.table[place]].states[offset]

    def _write(self, owner: _Owner, start: int, states: list[int]) -> None:
        written = 0
        while written < len(states):
            place, offset = divmod(start + written, PAGE_SIZE)
            self._check_page(owner, place, start + written)
            count = min(PAGE_SIZE - offset, len(states) - written)
            self._pages[owner.table[place]].states[offset:] = states[written : written + count]
            written += count

    def _write_ids(self, owner: _Owner, start: int, token_ids: Iterable[int]) -> None:
        """What a script is matched against: pages keep ids too, so that a prompt is known however it came into them."""
        for position, token_id in enumerate(token_ids, start):
            place, offset = divmod(position, PAGE_SIZE)
            self._pages[owner.table[place]].token_ids[offset:] = [token_id]

    def _prompt_ids(self, owner: _Owner, num_tokens: int) -> list[int]:
        held = [token_id for number in owner.table for token_id in self._pages[number].token_ids]
        return held[:num_tokens]

    def _sample(self, owner: _Owner, state: int, output_index: int) -> int:
        if owner.answer is not None and output_index < len(owner.answer):
            return owner.answer[output_index]
        if self._eos_after is not None and output_index >= self._eos_after[0]:
            return self._eos_after[1]
        return _choose(state, output_index, self._vocab_size, self._avoid_ids)

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
        bound: Sequence[tuple[_Owner | None, str | None]],
        ready_s: float,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._bound = bound
        self._ready_s = ready_s

    def collect(self) -> StepOutput:
        return self._runner.execute(self._plan, self._bound, self._ready_s)


class _ViolationError(Exception):
    """A row's tokens or pages are not what they must be."""


class _Owner:
    """One stay of a request in a slot: the generation that pages are tagged with."""

    __slots__ = (
        "answer",
        "last_start",
        "lost_page",
        "next_check",
        "next_start",
        "num_sampled",
        "sampled",
        "sampling",
        "table",
    )

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.table: list[int] = []
        self.next_start = 0
        self.last_start = -1
        self.next_check = 0
        self.num_sampled: int | None = None
        self.sampled: tuple[int, int] | None = None
        self.lost_page: int | None = None
        self.answer: tuple[int, ...] | None = None


class _Page:
    """`states[o]` is the hash state after the token at offset o; the tag says whose page it is, and which."""

    __slots__ = ("owner", "place", "states", "token_ids")

    def __init__(self) -> None:
        self.owner: _Owner | None = None
        self.place = -1
        self.states: list[int] = []
        self.token_ids: list[int] = []


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
