"""What a step's output means for its requests: tokens, ends, and pages that are full now. Owned by the scheduler.

Rows in columns that went as expected, all but a few of a busy step, are committed by array operations; a row that
stops, fails, fills a page or was displaced meanwhile is looked at by itself, and so are prompts and rows with a mask.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from baleen_worker.grammar.guide import GuideError
from baleen_worker.news import News, TokenNews
from baleen_worker.output import Output, failed
from baleen_worker.request import ErrorCode, FinishReason, Role
from baleen_worker.sequence import Sequence, State
from baleen_worker.step_columns import DecodeColumns, OneTokenEach

if TYPE_CHECKING:
    from baleen_worker.draft import Draft
    from baleen_worker.grammar.guide import Guide
    from baleen_worker.roster import Roster
    from baleen_worker.slots import Bools, Ints
    from baleen_worker.step import PlannedRow, StepOutput


class Committer:
    """Commits drafts in the order in which they were planned."""

    def __init__(self, roster: Roster, page_size: int) -> None:
        self._roster = roster
        self._columns = roster.columns
        self._residency = roster.residency
        self._page_size = page_size
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0

    def commit(self, draft: Draft, output: StepOutput) -> News:
        """The oldest step in flight has produced `output`; what its requests are to be told."""
        news = News()
        first = 0
        tokens = None
        if draft.decodes is not None:
            first = len(draft.decodes)
            tokens = self._commit_columns(draft.decodes, draft.is_decoded, output, news.outputs)
        columns = self._columns
        for index, (row, sequence) in enumerate(zip(draft.others, draft.sequences, strict=True), first):
            columns.num_in_flight[sequence.slot] -= 1
            columns.num_pending[sequence.slot] -= row.sample
            self._land(sequence, row, index, output, news.outputs)
        news.tokens = tokens
        return news

    # --- rows in columns --------------------------------------------------------------------------------------------

    def _commit_columns(
        self, rows: DecodeColumns, landed: Bools, output: StepOutput, outputs: list[Output]
    ) -> TokenNews | None:
        columns = self._columns
        columns.land_token(landed)
        slots, token_ids = rows.slots, _one_each(output, len(rows))
        usual = columns.decodes & landed
        certain = isinstance(output.token_ids, OneTokenEach) and not output.errors
        if not certain or np.count_nonzero(usual) < len(slots):
            is_usual = usual[slots] & (token_ids >= 0)
            for index in (~is_usual).nonzero()[0].tolist():
                usual[slots[index]] = False
                self._land(columns.at(slots[index]), rows.row(index), index, output, outputs)
            slots, token_ids = slots[is_usual], token_ids[is_usual]
        columns.append(slots, token_ids, usual)
        self.num_generated_tokens += len(slots)
        num_computed = columns.num_tokens - 1  # the last token's keys are not in the pages yet
        full = (usual & (num_computed % self._page_size == 0)).nonzero()[0]
        if len(full):
            self._fill_pages(full, num_computed[full])
        ends = columns.may_stop(token_ids)
        ends |= (columns.num_tokens >= columns.max_len)[slots]
        if np.count_nonzero(ends):
            goes_on = self._end(slots, token_ids, ends, outputs)
            slots, token_ids = slots[goes_on], token_ids[goes_on]
        if not len(slots):
            return None
        return TokenNews(columns.audience(slots), token_ids)

    def _fill_pages(self, slots: Ints, num_computed: Ints) -> None:
        """Each of the slots has just filled a page."""
        self._columns.settle(slots)
        for slot, end in zip(slots.tolist(), num_computed.tolist(), strict=True):
            self._residency.attach(self._columns.at(slot), end)

    def _end(self, slots: Ints, token_ids: Ints, ends: Bools, outputs: list[Output]) -> Bools:
        """Ends the requests whose token is one of their own stop ids, or their last; returns which rows go on."""
        goes_on = ~ends
        for place in ends.nonzero()[0].tolist():
            sequence, token_id = self._columns.at(slots[place]), int(token_ids[place])
            stops = token_id in sequence.stop_ids
            if not stops and sequence.num_tokens < sequence.max_len:  # it stops others
                goes_on[place] = True
                continue
            self._roster.finish(sequence)
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            outputs.append(Output(sequence.id, [token_id], reason, cached_tokens=sequence.num_cached or 0))
        return goes_on

    # --- one row ----------------------------------------------------------------------------------------------------

    def _land(self, sequence: Sequence, row: PlannedRow, index: int, output: StepOutput, outputs: list[Output]) -> None:
        """Commits a row whose counters say already that it has landed."""
        if sequence.state is State.FINISHED:
            self._roster.landed(sequence)
            return
        if index in output.errors:
            self._roster.finish(sequence)
            outputs.append(failed(sequence.id, ErrorCode.INTERNAL, output.errors[index]))
            return
        if sequence.role is Role.PREFILL:
            self._land_prefill_leg(sequence, row, index, output, outputs)
            return
        told = self._commit_row(sequence, row, output.token_ids[index])
        if sequence.state is State.LEAVING:
            self._roster.landed(sequence)
        if index in output.prompt_logprobs:
            told = told or Output(sequence.id)
            told.prompt_logprobs = output.prompt_logprobs[index]
        if told is not None:
            told.logprobs = output.logprobs.get(index)
            told.cached_tokens = sequence.num_cached or 0
            outputs.append(told)

    def _land_prefill_leg(
        self, sequence: Sequence, row: PlannedRow, index: int, output: StepOutput, outputs: list[Output]
    ) -> None:
        """What the row has computed is the other worker's to fetch and to tell."""
        end = row.start + row.num_tokens
        self._note_computed(sequence, row, end)
        legs = self._roster.legs
        if index in output.prompt_logprobs:
            legs.score(sequence, row.start, output.prompt_logprobs[index])
        if sequence.state is State.LEAVING:  # its pages go, and its token will be sampled again
            self._roster.landed(sequence)
            return
        legs.offer(sequence, end, whole=row.sample)
        if not row.sample:
            return
        token_ids = output.token_ids[index]
        if not token_ids:
            self._roster.finish(sequence)
            outputs.append(failed(sequence.id, ErrorCode.INTERNAL, "the step sampled no token for this request"))
            return
        self._roster.hold(sequence)
        legs.finish(sequence, token_ids[0], output.logprobs.get(index))

    def first_token(self, sequence: Sequence, token_id: int) -> Output:
        """A decode leg's pages have come, with the token that follows them."""
        told = self._take_tokens(sequence, [token_id])
        told.cached_tokens = sequence.num_cached or 0
        return told

    def _commit_row(self, sequence: Sequence, row: PlannedRow, token_ids: list[int]) -> Output | None:
        """Appends a row's tokens up to the first that ends the request; None when there is nothing to tell yet."""
        end = row.start + row.num_tokens
        self._note_computed(sequence, row, end)
        if not row.sample:
            if end < sequence.max_len:
                return None  # more of the prompt is to come
            self._roster.finish(sequence)  # nothing was to be sampled: the prompt is scored
            return Output(sequence.id, finish_reason=FinishReason.LENGTH)
        if not token_ids:
            self._roster.finish(sequence)
            return failed(sequence.id, ErrorCode.INTERNAL, "the step sampled no token for this request")
        return self._take_tokens(sequence, token_ids)

    def _note_computed(self, sequence: Sequence, row: PlannedRow, end: int) -> None:
        """The keys of a row's tokens, up to `end`, are in the pages."""
        if sequence.node is not None and end // self._page_size > sequence.num_attached:
            self._residency.attach(sequence, end)
        if row.start < sequence.num_prompt:
            self.num_prompt_tokens += row.num_tokens
            if end >= sequence.num_prompt:
                self._roster.prompt_computed(sequence)

    def _take_tokens(self, sequence: Sequence, token_ids: list[int]) -> Output:
        finish_reason = None
        for count, token_id in enumerate(token_ids, 1):
            sequence.append(token_id)
            if token_id in sequence.stop_ids:
                finish_reason = FinishReason.STOP
            elif sequence.num_tokens >= sequence.max_len:
                finish_reason = FinishReason.LENGTH
            else:
                if sequence.guide is not None and (problem := _advance(sequence.guide, token_id)) is not None:
                    self._roster.finish(sequence)
                    return failed(sequence.id, ErrorCode.INTERNAL, problem)
                continue
            token_ids = token_ids[:count]
            break
        self.num_generated_tokens += len(token_ids)
        if len(token_ids) > 1:
            assert not sequence.num_pending, "a row yielded several tokens while the next one was under way"
            # Keys of all but the last token are in the pages.
            self._columns.num_planned[sequence.slot] = sequence.num_tokens - 1
        if finish_reason is not None:
            self._roster.finish(sequence)
        return Output(sequence.id, token_ids, finish_reason)


def _one_each(output: StepOutput, count: int) -> Ints:
    """The tokens of the first `count` rows; -1 where a row has failed or has not yielded exactly one."""
    by_row = output.token_ids
    if isinstance(by_row, OneTokenEach):
        column = by_row.column[:count]
    else:
        rows = itertools.islice(by_row, count)
        column = np.fromiter((row[0] if len(row) == 1 else -1 for row in rows), np.int64, count)
    if output.errors:
        column = column.copy()
        column[[index for index in output.errors if index < count]] = -1
    return column


def _advance(guide: Guide, token_id: int) -> str | None:
    try:
        guide.advance(token_id)
    except GuideError as error:
        return str(error)
    return None
