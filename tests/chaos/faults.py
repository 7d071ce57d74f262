"""The faults, one row each: what is done to the stack, how soon it must be whole again, and whether requests may fail.

A row's function (`strikes/`) strikes, waits as long as the fault lasts, ends it and starts again what it killed. What
it draws comes from the seed, so that a row and a seed name one schedule; the moments at which requests are hit are the
machine's own, unless the row is about a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chaos.stack import ALIKE, PAIRS, Strike
from chaos.strikes import links, machine, moments, requests, workers
from chaos.worker import FRAME_BACK


@dataclass(frozen=True, slots=True)
class Fault:
    """`recover_s`: from the end of the fault until all workers of `roles` serve. `may_fail`: requests may fail, with a
    reason.

    `may_cut`: also without one, because who would have to say it is dead. `counts`: a counter of the workers that the
    fault must have moved, so that it is known to have been noticed. `wait_s`: nobody waits longer for a token; the
    fault lasts longer, so that it is seen when nobody notices it.
    """

    strike: Strike
    recover_s: float
    may_fail: bool = False
    may_cut: bool = False
    roles: tuple[str, ...] = ALIKE
    counts: str | None = None
    wait_s: float | None = None


# Ten seconds of silence, seen within another one; what had no token rests for one more, and computes its prompt again.
NOTICED_S = 14.0

ROWS: dict[str, Fault] = {
    "kill-worker": Fault(workers.kill_worker, recover_s=2),
    "kill-rank": Fault(workers.kill_rank, recover_s=2),
    "kill-all-but-one": Fault(workers.kill_all_but_one, recover_s=2),
    "kill-all": Fault(workers.kill_all, recover_s=15, may_fail=True),
    "kill-gateway": Fault(workers.kill_gateway, recover_s=5, may_fail=True, may_cut=True),
    "kill-at-step": Fault(moments.killed_at("step"), recover_s=2),
    "stop-worker": Fault(workers.stop_worker, recover_s=10, wait_s=NOTICED_S),
    "hiccup": Fault(workers.hiccup, recover_s=2),
    "partition": Fault(links.blocked(links.to_worker), recover_s=10, wait_s=NOTICED_S),
    "partition-there": Fault(links.blocked(links.to_worker, "there"), recover_s=10, wait_s=NOTICED_S),
    "partition-back": Fault(links.blocked(links.to_worker, "back"), recover_s=10, wait_s=NOTICED_S),
    "flapping": Fault(links.flapping, recover_s=10),
    "reset": Fault(links.reset, recover_s=2),
    "half-close": Fault(links.half_close, recover_s=2),
    "truncated": Fault(links.truncated, recover_s=2),
    "slow-link": Fault(links.slow_link, recover_s=2),
    **{f"frame-{action}": Fault(moments.frames(action), recover_s=5) for action in moments.FRAME_ACTIONS},
    "stall-head": Fault(machine.stalled(FRAME_BACK), recover_s=10, wait_s=NOTICED_S),
    "stall-rank": Fault(machine.stalled("step"), recover_s=10, wait_s=NOTICED_S),
    "clock-jumps": Fault(machine.clock_jumps, recover_s=2),
    "disk-full": Fault(machine.disk_full, recover_s=2),
    "disk-full-gateway": Fault(machine.disk_full_gateway, recover_s=5, may_fail=True, may_cut=True),
    "drain-worker": Fault(workers.drain_worker, recover_s=2),
    "rolling-upgrade": Fault(workers.rolling_upgrade, recover_s=2),
    "no-descriptors": Fault(workers.no_descriptors, recover_s=5, may_fail=True, may_cut=True),
    "deadly-request": Fault(requests.deadly_request, recover_s=2),
    "deadly-fifty": Fault(requests.deadly_fifty, recover_s=2),
    "clients-leave": Fault(requests.clients_leave, recover_s=2),
    "slow-readers": Fault(requests.slow_readers, recover_s=2),
    "pool-exhausted": Fault(requests.pool_exhausted, recover_s=2),
}

# With prompts and answers at different workers. Of the two of a role one always lives, or all may fail.
_ON_PAIRS = [row for row in ROWS if row not in ("kill-all-but-one", "disk-full-gateway")]
ROWS |= {f"pairs-{row}": replace(ROWS[row], roles=PAIRS) for row in _ON_PAIRS}
# A deadly request may take two prefill workers with it, so that its neighbours need a third.
for _row in ("pairs-deadly-request", "pairs-deadly-fifty"):
    ROWS[_row] = replace(ROWS[_row], roles=("prefill", *PAIRS))

ROWS |= {
    "pairs-kill-prefills": Fault(workers.kill_prefills, recover_s=15, may_fail=True, roles=PAIRS),
    "pairs-kill-decodes": Fault(workers.kill_decodes, recover_s=15, may_fail=True, roles=PAIRS),
    "pages-late": Fault(links.pages_late, recover_s=2, roles=PAIRS),
    "pages-cut": Fault(links.pages_cut, recover_s=2, roles=PAIRS),
    "pages-reset": Fault(links.pages_reset, recover_s=2, roles=PAIRS),
    "pages-sliced": Fault(links.pages_sliced, recover_s=2, roles=PAIRS),
    "pages-corrupt": Fault(links.pages_corrupt, recover_s=2, roles=PAIRS, counts="damaged_reads"),
    "pages-slow": Fault(links.pages_slow, recover_s=2, roles=PAIRS),
    "pages-half-closed": Fault(links.pages_half_closed, recover_s=2, roles=PAIRS),
    "pages-refused": Fault(links.pages_refused, recover_s=2, roles=PAIRS),
    "pages-blocked": Fault(links.blocked(links.to_pages), recover_s=10, wait_s=NOTICED_S, roles=PAIRS),
    "pages-blocked-there": Fault(links.blocked(links.to_pages, "there"), recover_s=10, wait_s=NOTICED_S, roles=PAIRS),
    "pages-blocked-back": Fault(links.blocked(links.to_pages, "back"), recover_s=10, wait_s=NOTICED_S, roles=PAIRS),
}
_PHASES = ("announced", "serving", "finishing", "reserved", "storing", "arrived", "first-token")
ROWS |= {f"pairs-kill-at-{phase}": Fault(moments.killed_at(phase), recover_s=2, roles=PAIRS) for phase in _PHASES}
ROWS |= {
    f"pairs-stop-at-{phase}": Fault(moments.stopped_at(phase), recover_s=10, wait_s=NOTICED_S, roles=PAIRS)
    for phase in _PHASES
}

# Of every kind of fault a row or a few, on pairs, where each strikes more: what a pipeline plays.
OF_EACH_KIND = (
    *("pairs-kill-worker", "pairs-kill-gateway", "pairs-kill-rank", "pairs-kill-decodes"),
    *("pairs-kill-at-reserved", "pairs-kill-at-serving", "pairs-kill-at-first-token", "pairs-stop-at-storing"),
    *("pairs-stop-worker", "pairs-stall-head", "pairs-stall-rank"),
    *("pairs-partition", "pairs-partition-there", "pages-blocked-back", "pairs-flapping"),
    *("pairs-reset", "pairs-half-close", "pairs-truncated", "pairs-slow-readers"),
    *("pairs-frame-drop", "pairs-frame-duplicate", "pairs-frame-swap", "pairs-frame-delay"),
    *("pairs-pool-exhausted", "pages-slow", "pages-corrupt"),
    *("pairs-deadly-fifty", "pairs-drain-worker", "pairs-rolling-upgrade"),
    *("pairs-disk-full", "pairs-clock-jumps", "pairs-no-descriptors"),
)
