"""Every live request and where it is: parked, waiting, computing its prompt, decoding, leaving. Owned by the scheduler.

A sequence changes places here and nowhere else, so that no two queues ever disagree. Planning and committing are
collaborators over one roster; neither has a queue of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baleen_worker.legs import Legs
from baleen_worker.sequence import Sequence, State
from baleen_worker.waiting import Policy, SampleGroups, WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from baleen_worker.grammar.guide import Guide
    from baleen_worker.request import Request, RequestId
    from baleen_worker.residency import Found, Residency


class Roster:
    """`shares_prompts`: samples of one prompt wait for the first of them, whose pages they will find."""

    def __init__(self, residency: Residency, policy: Policy, page_size: int, *, shares_prompts: bool) -> None:
        self.residency = residency
        self.columns = residency.columns
        self._page_size = page_size
        self._shares_prompts = shares_prompts
        self.legs = Legs(residency.generations_of)
        self.waiting = WaitingRoom(policy, lambda s: len(residency.find(s)) * page_size)
        self._groups = SampleGroups()
        self._live: dict[RequestId, Sequence] = {}
        self._guided: dict[RequestId, Sequence] = {}
        self.prefilling: dict[RequestId, Sequence] = {}
        self.num_decoding = 0
        self.num_host_dependent = 0
        self._num_arrivals = 0

    # --- who is there -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Live requests."""
        return len(self._live)

    def get(self, request_id: RequestId) -> Sequence | None:
        """The live request of that name."""
        return self._live.get(request_id)

    def of_stream(self, stream: int) -> list[RequestId]:
        """Live requests of one Connect stream."""
        return [request_id for request_id in self._live if request_id[0] == stream]

    @property
    def guided(self) -> list[Sequence]:
        """Live requests whose answer is constrained."""
        return [*self._guided.values()]

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and compute."""
        return len(self.prefilling) + self.num_decoding

    @property
    def num_queued(self) -> int:
        """Requests that have yet to run, or to run again."""
        return len(self.waiting) + len(self._groups) + len(self.legs.awaited)

    def running(self) -> Iterator[Sequence]:
        """Those that compute. Costs O(slots)."""
        columns = self.columns
        return (columns.at(slot) for slot in columns.runs.nonzero()[0].tolist())

    # --- they come --------------------------------------------------------------------------------------------------

    def enrol(self, request: Request, guide: Guide | None) -> Sequence:
        """A new request waits."""
        self._num_arrivals += 1
        sequence = Sequence(request, arrival=self._num_arrivals, guide=guide)
        self._live[request.id] = sequence
        if guide is not None:
            self._guided[request.id] = sequence
        self.waiting.open_account(sequence.salt)
        if request.leg is not None:
            self.legs.open(sequence)
        if sequence.expects_pages:
            sequence.state = State.AWAITING
        else:
            self._enqueue(sequence)
        return sequence

    def peer_has_begun(self, sequence: Sequence) -> None:
        """A decode leg waits for pages only now, so that none are reserved for a prompt that is not computed yet."""
        del self.legs.awaited[sequence.request.leg_key]
        sequence.state = State.WAITING
        self.waiting.push(sequence)

    def enter(self, sequence: Sequence, found: Found) -> int:
        """Its turn has come: it runs, from behind the cached pages. Returns the prompt tokens newly found there."""
        self.waiting.admit(sequence)
        start = len(found) * self._page_size
        num_found = 0
        if sequence.num_cached is None:
            num_found = sequence.num_cached = min(start, sequence.num_prompt)
        self.residency.enter(sequence, found)
        if sequence.expects_pages:
            self._reserve(sequence, len(found))
            return num_found
        self.waiting.charge(sequence.salt, sequence.num_tokens - start)
        self.prefilling[sequence.id] = sequence
        self.num_host_dependent += sequence.host_dependent
        return num_found

    def _reserve(self, sequence: Sequence, num_found: int) -> None:
        """Its pages may come. Until they have, or provably will not, the transfer counts as a step in flight."""
        sequence.state = State.RECEIVING
        columns, slot = self.columns, sequence.slot
        columns.runs[slot], columns.reserves[slot] = False, True
        columns.num_in_flight[slot] = 1
        self.legs.reserve(sequence, num_found, self.residency.pages_for(sequence.num_tokens))

    def pages_have_come(self, sequence: Sequence) -> None:
        """It runs: all tokens it knows are in its pages."""
        columns, slot = self.columns, sequence.slot
        columns.num_in_flight[slot] = 0
        columns.runs[slot], columns.reserves[slot] = True, False
        columns.num_planned[slot] = sequence.num_tokens
        self.residency.attach(sequence, sequence.num_tokens)
        sequence.state = State.RUNNING
        sequence.expects_pages = False
        self.prefilling[sequence.id] = sequence
        self.num_host_dependent += sequence.host_dependent

    def hold(self, sequence: Sequence) -> None:
        """A prefill leg has its token; another worker will fetch both."""
        self._stop(sequence)
        sequence.state = State.HELD

    def begin_decoding(self, sequence: Sequence) -> None:
        """All of its prompt is planned."""
        del self.prefilling[sequence.id]
        self.columns.decodes[sequence.slot] = True
        self.num_decoding += 1

    def prompt_computed(self, sequence: Sequence) -> None:
        """Those who waited for its prompt need not any more."""
        if sequence.request.group_id:
            for follower in self._groups.release(sequence):
                self.waiting.push(follower)

    # --- they go ----------------------------------------------------------------------------------------------------

    def displace(self, sequence: Sequence) -> None:
        """Its place is taken away; it waits again, at once or when the steps in flight have landed."""
        self._stop(sequence)
        self.legs.withdraw(sequence)
        sequence.state = State.LEAVING
        if self.residency.leave(sequence):
            self._wait_again(sequence)

    def landed(self, sequence: Sequence) -> None:
        """A step that referred to a sequence which does not run any more was collected."""
        if self.residency.landed(sequence) and sequence.state is State.LEAVING:
            self._wait_again(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The request is over, whatever it was doing."""
        del self._live[sequence.id]
        self._guided.pop(sequence.id, None)
        state, sequence.state = sequence.state, State.FINISHED
        self.waiting.charge(sequence.salt, sequence.num_output - len(sequence.request.resumed_token_ids))
        waits = state is State.WAITING
        if sequence.request.group_id and not sequence.expects_pages:
            self._leave_group(sequence, waits=waits)
        elif waits:
            self.waiting.remove(sequence)
        self.legs.end(sequence)
        if state is State.RUNNING:
            self._stop(sequence)
        if state in (State.RUNNING, State.RECEIVING, State.HELD):
            self.columns.reserves[sequence.slot] = False
            self.residency.leave(sequence)
        elif state is State.LEAVING and sequence.num_in_flight == 0:
            self.residency.landed(sequence)
        self.waiting.close_account(sequence.salt)

    def check(self, quarantined: Collection[int] = ()) -> None:
        """Asserts that everybody is in one place. Costs O(pages): for tests."""
        columns = self.columns
        running = [*self.running()]
        elsewhere = [s for s in self._live.values() if s.state in (State.RECEIVING, State.HELD)]
        self.residency.check([*running, *elsewhere], quarantined)
        assert self.legs.num_waiting == len(self.legs.awaited) + len(elsewhere), "a leg is miscounted"
        assert all(sequence.state is State.RUNNING for sequence in running), "a sequence that is over still runs"
        decoding = [s for s in running if columns.decodes[s.slot]]
        assert len(decoding) == self.num_decoding == columns.decodes.sum(), "decodes are miscounted"
        assert {s.id for s in running} - {s.id for s in decoding} == set(self.prefilling), "somebody runs unseen"
        leaving = sum(sequence.state is State.LEAVING for sequence in self._live.values())
        away = len(running) + leaving + len(elsewhere)
        assert len(self) == self.num_queued + away, "a live request neither waits nor runs"
        assert self.num_host_dependent == sum(s.host_dependent for s in running), "host-dependent rows are miscounted"
        for sequence in running:
            slot = sequence.slot
            assert columns.num_tokens[slot] == len(sequence.token_ids), "a sequence's tokens are miscounted"
            assert columns.num_pages[slot] == len(sequence.pages), "a sequence's pages are miscounted"

    # --- within -----------------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        """Waits for its turn, or first for the sample of its group that computes what both need."""
        shares = self._shares_prompts and sequence.num_prompt > self._page_size
        if sequence.request.group_id and shares and self._groups.join(sequence):
            return
        self.waiting.push(sequence)

    def _leave_group(self, sequence: Sequence, *, waits: bool) -> None:
        """Those who waited for its prompt wait for another of the group, who is next."""
        was_parked = self._groups.is_parked(sequence)
        followers = self._groups.release(sequence)
        if waits and not was_parked:
            self.waiting.remove(sequence)
        for follower in followers:
            self._enqueue(follower)

    def _stop(self, sequence: Sequence) -> None:
        columns, slot = self.columns, sequence.slot
        if columns.decodes[slot]:
            self.num_decoding -= 1
        else:
            del self.prefilling[sequence.id]
        columns.runs[slot] = columns.decodes[slot] = False
        self.num_host_dependent -= sequence.host_dependent

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.waiting.push(sequence, returns=True)
