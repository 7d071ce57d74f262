"""Faults of processes: killed, stopped, drained, and out of descriptors."""

from __future__ import annotations

import asyncio
import random
import resource
import signal

import psutil
from chaos.stack import Member, Stack
from harness.processes import wait_for

# Longer than a gateway waits for a worker that says nothing.
LONG_SILENCE_S = 16.0


async def kill(member: Member, number: int, *, rank_only: bool = False) -> None:
    member.signal(number, rank_only=rank_only)
    for _ in range(200):
        if not member.is_alive():
            break
        await asyncio.sleep(0.05)


async def start_again(stack: Stack, *members: Member) -> None:
    """Starts dead workers; returns when they say that they are ready: recovery is what the gateway takes from there."""
    for member in members:
        member.start()
    for member in members:
        await asyncio.to_thread(wait_for, f"{member.name} is ready", member.is_ready)


async def kill_worker(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await kill(victim, signal.SIGKILL)
    await asyncio.sleep(g.uniform(0.0, 1.0))
    await start_again(stack, victim)


async def kill_rank(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await kill(victim, signal.SIGKILL, rank_only=True)
    await start_again(stack, victim)


async def kill_all_but_one(stack: Stack, g: random.Random) -> None:
    victims = g.sample(stack.members, len(stack.members) - 1)
    for victim in victims:
        await kill(victim, signal.SIGKILL)
        await asyncio.sleep(g.uniform(0.0, 0.5))
    await start_again(stack, *victims)


async def kill_all(stack: Stack, g: random.Random) -> None:
    for victim in stack.members:
        await kill(victim, signal.SIGKILL)
    await asyncio.sleep(g.uniform(0.0, 1.0))
    await start_again(stack, *stack.members)


async def stop_worker(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    victim.signal(signal.SIGSTOP)
    await asyncio.sleep(LONG_SILENCE_S)
    victim.signal(signal.SIGCONT)


async def hiccup(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    victim.signal(signal.SIGSTOP)
    await asyncio.sleep(g.uniform(0.2, 2.0))
    victim.signal(signal.SIGCONT)


async def drain_worker(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await terminate(victim)
    await start_again(stack, victim)


async def rolling_upgrade(stack: Stack, g: random.Random) -> None:
    for victim in g.sample(stack.members, len(stack.members)):
        await terminate(victim)
        await start_again(stack, victim)
        await stack.all_ready(30.0)


async def terminate(member: Member) -> None:
    """Asks a worker to end and waits until it has; what it runs comes to its end first."""
    process = member.process
    assert process is not None
    process.signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, 60.0)


async def kill_gateway(stack: Stack, g: random.Random) -> None:
    stack.kill_gateway()
    await asyncio.sleep(g.uniform(0.0, 0.5))
    stack.stop_gateway()
    stack.start_gateway()


async def kill_prefills(stack: Stack, g: random.Random) -> None:
    await _kill_role(stack, g, "prefill")


async def kill_decodes(stack: Stack, g: random.Random) -> None:
    await _kill_role(stack, g, "decode")


async def _kill_role(stack: Stack, g: random.Random, role: str) -> None:
    """All of a role, one after the other within a second."""
    victims = [member for member in stack.members if member.role == role]
    for victim in g.sample(victims, len(victims)):
        await kill(victim, signal.SIGKILL)
        await asyncio.sleep(g.uniform(0.0, 0.8 / len(victims)))
    await start_again(stack, *victims)


async def no_descriptors(stack: Stack, g: random.Random) -> None:
    """The gateway or a worker can open nothing more for a while."""
    assert stack.gateway is not None
    heads = [member.process for member in stack.members if member.process is not None]
    victim = psutil.Process(g.choice([stack.gateway, *heads]).pid)
    before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (victim.num_fds(), before[1]))
    try:
        await asyncio.sleep(g.uniform(1.0, 4.0))
    finally:
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, before)
