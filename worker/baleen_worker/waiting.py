"""Who waits, and who is next: priority, then fairness among tenants, then the chosen policy. Owned by the scheduler.

A tenant is a `cache_salt`. Among tenants of the highest waiting priority the one is next for which the fewest tokens
have been computed; tokens found in the cache cost it nothing. Within a tenant:

- `fcfs`: in order of arrival;
- `lpm`: the longest prefix found in the cache first;
- `shortest-prefill-first`: the fewest tokens to compute first.

The last two look at the first WINDOW requests, and nobody is overtaken more than MAX_OVERTAKEN times.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from baleen_worker.request import RequestId
    from baleen_worker.sequence import Sequence

WINDOW = 128
MAX_OVERTAKEN = 64


class Policy(enum.Enum):
    """Order within one priority and tenant."""

    FCFS = "fcfs"
    LONGEST_PREFIX = "lpm"
    SHORTEST_PREFILL = "shortest-prefill-first"


class _Tenant:
    """`num_computed`: tokens computed for it, or what others had when it came. `queues` by priority, none empty."""

    __slots__ = ("num_computed", "num_live", "queues")

    def __init__(self, num_computed: int) -> None:
        self.num_computed = num_computed
        self.num_live = 0
        self.queues: dict[int, OrderedDict[RequestId, Sequence]] = {}


class WaitingRoom:
    """Waiting sequences. `num_cached` says how many of a sequence's tokens would be found in the cache now."""

    def __init__(self, policy: Policy, num_cached: Callable[[Sequence], int]) -> None:
        self._policy = policy
        self._num_cached = num_cached
        self._tenants: dict[str, _Tenant] = {}
        self._num_by_priority: dict[int, int] = {}
        self._num_waiting = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting sequences hold."""
        return self._num_tokens

    @property
    def top_priority(self) -> int:
        """Of those who wait; somebody must."""
        return max(self._num_by_priority)

    # --- tenants --------------------------------------------------------------------------------------------------

    def open_account(self, salt: str) -> None:
        """A request of the tenant is live from now on. A tenant that comes anew starts where the least served is."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            least = min((other.num_computed for other in self._tenants.values()), default=0)
            tenant = self._tenants[salt] = _Tenant(least)
        tenant.num_live += 1

    def close_account(self, salt: str) -> None:
        """A request of the tenant has ended."""
        tenant = self._tenants[salt]
        tenant.num_live -= 1
        if not tenant.num_live:
            del self._tenants[salt]

    def charge(self, salt: str, num_tokens: int) -> None:
        """Tokens are computed for a tenant."""
        self._tenants[salt].num_computed += num_tokens

    # --- the queue ------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, *, returns: bool = False) -> None:
        """Joins the end; one that returns from a preemption goes to the front."""
        priority = sequence.request.priority
        queue = self._tenants[sequence.salt].queues.setdefault(priority, OrderedDict())
        queue[sequence.id] = sequence
        if returns:
            queue.move_to_end(sequence.id, last=False)
        self._num_by_priority[priority] = self._num_by_priority.get(priority, 0) + 1
        self._num_waiting += 1
        self._num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        priority = sequence.request.priority
        queues = self._tenants[sequence.salt].queues
        del queues[priority][sequence.id]
        if not queues[priority]:
            del queues[priority]
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]
        self._num_waiting -= 1
        self._num_tokens -= sequence.num_tokens

    def first(self) -> Sequence | None:
        """Who is next, without removing it."""
        if not self._num_waiting:
            return None
        queue = self._first_queue()
        oldest = next(iter(queue.values()))
        if self._policy is Policy.FCFS or len(queue) == 1 or oldest.num_overtaken >= MAX_OVERTAKEN:
            return oldest
        window = [sequence for sequence, _ in zip(queue.values(), range(WINDOW), strict=False)]
        # The first of equals is the oldest.
        if self._policy is Policy.LONGEST_PREFIX:
            return max(window, key=self._num_cached)
        return min(window, key=lambda sequence: sequence.num_tokens - self._num_cached(sequence))

    def admit(self, sequence: Sequence) -> None:
        """Takes the one out that `first` has named, and counts whom it overtakes."""
        queue = self._first_queue()
        oldest = next(iter(queue.values()))
        if oldest is not sequence:
            oldest.num_overtaken += 1
        self.remove(sequence)

    def _first_queue(self) -> OrderedDict[RequestId, Sequence]:
        priority = self.top_priority
        tenants = self._tenants.values()
        if len(self._tenants) == 1:
            [tenant] = tenants
        else:
            tenant = min((t for t in tenants if priority in t.queues), key=lambda t: t.num_computed)
        return tenant.queues[priority]


class SampleGroups:
    """Samples of one prompt that wait for the first of them to compute it, so that they find its pages."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[int, bytes], Sequence] = {}
        self._followers: dict[RequestId, list[Sequence]] = {}
        self._parked: dict[RequestId, Sequence] = {}  # follower to leader

    def __len__(self) -> int:
        """Sequences that wait for another."""
        return len(self._parked)

    def is_parked(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for another."""
        return sequence.id in self._parked

    def join(self, sequence: Sequence) -> bool:
        """Whether the sequence has to wait for another of its group; the first of a group leads it."""
        leader = self._leaders.setdefault(_group_of(sequence), sequence)
        if leader is sequence:
            return False
        self._followers.setdefault(leader.id, []).append(sequence)
        self._parked[sequence.id] = leader
        return True

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Its prompt is computed, or it is over: who need not wait for it any more."""
        leader = self._parked.pop(sequence.id, None)
        if leader is not None:
            self._followers[leader.id].remove(sequence)
            return []
        if self._leaders.get(_group_of(sequence)) is not sequence:
            return []
        del self._leaders[_group_of(sequence)]
        followers = self._followers.pop(sequence.id, [])
        for follower in followers:
            del self._parked[follower.id]
        return followers


def _group_of(sequence: Sequence) -> tuple[int, bytes]:
    return sequence.id[0], sequence.request.group_id
