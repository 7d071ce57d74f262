"""Faults at a moment: a worker is killed or stopped at a phase of a request, or loses or repeats a frame."""

from __future__ import annotations

import asyncio
import random
import signal

from chaos.rank import PHASES
from chaos.stack import Member, Stack, Strike
from chaos.strikes.workers import LONG_SILENCE_S, start_again
from chaos.trap import KILL, STOP, Order
from chaos.worker import FRAME_ACTIONS, FRAME_BACK, FRAME_THERE

# A moment that does not come in this time is none that the load brings about.
PATIENCE_S = 30.0
MAX_SKIP = 12
_OF_PREFILL = ("announced", "serving", "finishing")


def killed_at(phase: str) -> Strike:
    """The process ends there, and is started again."""

    async def strike(stack: Stack, g: random.Random) -> None:
        victim = _victim(stack, g, phase)
        await spring(victim, Order(phase, KILL, g.randrange(MAX_SKIP)))
        while victim.is_alive():
            await asyncio.sleep(0.05)
        await start_again(stack, victim)

    return strike


def stopped_at(phase: str) -> Strike:
    """The process stops there for longer than anybody waits, and goes on."""

    async def strike(stack: Stack, g: random.Random) -> None:
        victim = _victim(stack, g, phase)
        await spring(victim, Order(phase, STOP, g.randrange(MAX_SKIP)))
        await asyncio.sleep(LONG_SILENCE_S)
        victim.signal(signal.SIGCONT)

    return strike


def frames(action: str) -> Strike:
    """Some frame between the gateway and a worker, three times over."""
    assert action in FRAME_ACTIONS, action

    async def strike(stack: Stack, g: random.Random) -> None:
        for _ in range(3):
            phase = g.choice([FRAME_THERE, FRAME_BACK])
            await spring(g.choice(stack.members), Order(phase, action, g.randrange(MAX_SKIP)))
            await asyncio.sleep(g.uniform(0.2, 0.8))

    return strike


async def spring(victim: Member, order: Order) -> None:
    """Gives the order and waits until it is carried out."""
    victim.trap.set(order)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not victim.trap.sprang:
                await asyncio.sleep(0.02)
    except TimeoutError:
        victim.trap.clear()
        raise AssertionError(f"{victim.name} never came to {order.phase!r}") from None


def _victim(stack: Stack, g: random.Random, phase: str) -> Member:
    """A worker that passes the phase."""
    assert phase in PHASES, phase
    role = "prefill" if phase in _OF_PREFILL else "decode"
    return g.choice([member for member in stack.members if member.role in (role, "unified")])
