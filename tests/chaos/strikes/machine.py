"""Faults of the machine: a disk that is full, a clock that jumps, a thread that stands still."""

from __future__ import annotations

import asyncio
import random
import signal

from chaos.stack import NO_ROOM, START_TIMEOUT_S, Stack, Strike
from chaos.strikes.moments import MAX_SKIP, spring
from chaos.strikes.workers import start_again, terminate
from chaos.trap import STALL, STALL_S, Order

HOUR_S = 3600.0


async def disk_full(stack: Stack, g: random.Random) -> None:
    """A worker whose log takes nothing, while there is something to complain of."""
    victim = g.choice(stack.members)
    await terminate(victim)
    victim.start(output=NO_ROOM)
    await stack.all_ready(START_TIMEOUT_S)
    for _ in range(3):
        victim.proxy.cut()
        await asyncio.sleep(g.uniform(0.3, 0.8))
    await stack.all_ready(START_TIMEOUT_S)
    if not victim.is_alive():
        raise AssertionError(f"{victim.name} does not live without a log")
    await terminate(victim)
    await start_again(stack, victim)


async def disk_full_gateway(stack: Stack, g: random.Random) -> None:
    """The same of the gateway."""
    assert stack.gateway is not None
    stack.gateway.signal(signal.SIGTERM)
    await asyncio.to_thread(stack.gateway.wait, 60.0)
    stack.stop_gateway()
    stack.start_gateway(output=NO_ROOM)
    await stack.all_ready(START_TIMEOUT_S)
    for _ in range(3):
        g.choice(stack.members).proxy.cut()
        await asyncio.sleep(g.uniform(0.3, 0.8))
    stack.gateway.require_running()


async def clock_jumps(stack: Stack, g: random.Random) -> None:
    """An hour ahead, an hour behind, in some processes or in all; then right again."""
    clocks = [stack.clock, *(member.clock for member in stack.members)]
    for ahead_s in g.sample([HOUR_S, -HOUR_S, HOUR_S], 3):
        for clock in g.sample(clocks, g.randrange(1, len(clocks) + 1)):
            clock.set(ahead_s)
        await asyncio.sleep(g.uniform(0.5, 2.0))
    for clock in clocks:
        clock.set(0.0)


def stalled(phase: str) -> Strike:
    """The thread that passes the phase stands still, and all that it serves with it, for longer than anybody waits."""

    async def strike(stack: Stack, g: random.Random) -> None:
        await spring(g.choice(stack.members), Order(phase, STALL, g.randrange(MAX_SKIP)))
        await asyncio.sleep(STALL_S)

    return strike
