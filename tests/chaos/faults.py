"""The faults, one row each: what is done to the stack, how soon it must be whole again, and whether requests may fail.

A row's function strikes, waits as long as the fault lasts, ends it and starts again what it killed. What it draws comes
from the seed, so that a row and a seed name one schedule; the moments at which requests are hit are the machine's own.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import httpx
from chaos.proxy import RESET
from chaos.stack import ALIKE, DEADLY_TOKEN_ID, PAIRS, Member, Stack
from harness.processes import wait_for

# Longer than a gateway waits for a worker that says nothing.
LONG_SILENCE_S = 13.0
# Workers that one request may take with it before it is refused.
MAX_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """`recover_s`: from the end of the fault until all workers of `roles` serve. `may_fail`: requests may fail, with a
    reason.

    `may_cut`: also without one, because who would have to say it is dead.
    """

    strike: Callable[[Stack, random.Random], Awaitable[None]]
    recover_s: float
    may_fail: bool = False
    may_cut: bool = False
    roles: tuple[str, ...] = ALIKE


async def _kill(member: Member, number: int, *, rank_only: bool = False) -> None:
    member.signal(number, rank_only=rank_only)
    for _ in range(200):
        if not member.is_alive():
            break
        await asyncio.sleep(0.05)


async def _start_again(stack: Stack, *members: Member) -> None:
    """Starts dead workers; returns when they say that they are ready: recovery is what the gateway takes from there."""
    for member in members:
        member.start()
    for member in members:
        await asyncio.to_thread(wait_for, f"{member.name} is ready", member.is_ready)


async def kill_worker(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await _kill(victim, signal.SIGKILL)
    await asyncio.sleep(g.uniform(0.0, 1.0))
    await _start_again(stack, victim)


async def kill_rank(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await _kill(victim, signal.SIGKILL, rank_only=True)
    await _start_again(stack, victim)


async def kill_all_but_one(stack: Stack, g: random.Random) -> None:
    victims = g.sample(stack.members, len(stack.members) - 1)
    for victim in victims:
        await _kill(victim, signal.SIGKILL)
        await asyncio.sleep(g.uniform(0.0, 0.5))
    await _start_again(stack, *victims)


async def kill_all(stack: Stack, g: random.Random) -> None:
    for victim in stack.members:
        await _kill(victim, signal.SIGKILL)
    await asyncio.sleep(g.uniform(0.0, 1.0))
    await _start_again(stack, *stack.members)


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


async def partition(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    proxy.block()
    await asyncio.sleep(LONG_SILENCE_S)
    proxy.heal()


async def partition_there(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    proxy.block(proxy.there)
    await asyncio.sleep(LONG_SILENCE_S)
    proxy.heal()


async def partition_back(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    proxy.block(proxy.back)
    await asyncio.sleep(LONG_SILENCE_S)
    proxy.heal()


async def flapping(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    for _ in range(8):
        proxy.block()
        await asyncio.sleep(g.uniform(0.05, 0.5))
        proxy.heal()
        if g.random() < 0.3:
            proxy.cut()
        await asyncio.sleep(g.uniform(0.05, 0.5))


async def reset(stack: Stack, g: random.Random) -> None:
    for _ in range(3):
        g.choice(stack.members).proxy.cut()
        await asyncio.sleep(g.uniform(0.1, 0.6))


async def half_close(stack: Stack, g: random.Random) -> None:
    g.choice(stack.members).proxy.half_close()
    await asyncio.sleep(1.0)


async def truncated(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    g.choice([proxy.there, proxy.back]).cut_after_bytes = g.randrange(1, 4000)
    await asyncio.sleep(2.0)


async def slow_link(stack: Stack, g: random.Random) -> None:
    proxy = g.choice(stack.members).proxy
    for direction in (proxy.there, proxy.back):
        direction.slice_bytes, direction.delay_s = g.randrange(1, 9), g.uniform(0.0, 0.05)
    await asyncio.sleep(2.0)
    proxy.heal()


async def drain_worker(stack: Stack, g: random.Random) -> None:
    victim = g.choice(stack.members)
    await _terminate(victim)
    await _start_again(stack, victim)


async def rolling_upgrade(stack: Stack, g: random.Random) -> None:
    for victim in g.sample(stack.members, len(stack.members)):
        await _terminate(victim)
        await _start_again(stack, victim)
        await stack.all_ready(30.0)


async def _terminate(member: Member) -> None:
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


async def clients_leave(stack: Stack, g: random.Random) -> None:
    """Requests whose clients are gone after a moment: some reset, some say good-bye, some never read."""
    silent: list[asyncio.StreamWriter] = []
    for _ in range(60):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        body = b'{"model":"micro","prompt":[%d,7,8,9],"max_tokens":4000,"stream":true}' % g.randrange(3, 2000)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: chaos\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        await writer.drain()
        await asyncio.sleep(g.uniform(0.0, 0.05))
        match g.randrange(3):
            case 0:
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()
            case 1:
                writer.close()
            case _:
                silent.append(writer)
    await asyncio.sleep(2.0)
    for writer in silent:
        writer.close()


async def deadly_request(stack: Stack, g: random.Random) -> None:
    """A request that kills whoever computes it, asked again and again; what died is started again meanwhile."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        for _ in range(3):
            prompt = [DEADLY_TOKEN_ID, *(g.randrange(3, 2000) for _ in range(8))]
            response = await http.post("/v1/completions", json={"model": "micro", "prompt": prompt, "max_tokens": 4})
            if response.status_code == 200:
                raise AssertionError(f"a deadly request was answered: {response.text}")
            await asyncio.sleep(1.0)
            dead = [member for member in stack.members if not member.is_alive()]
            await _start_again(stack, *dead)
            await stack.all_ready(30.0)
            if len(dead) > MAX_DEATHS:
                raise AssertionError(f"one request took {len(dead)} workers with it")


ROWS: dict[str, Fault] = {
    "kill-worker": Fault(kill_worker, recover_s=2),
    "kill-rank": Fault(kill_rank, recover_s=2),
    "kill-all-but-one": Fault(kill_all_but_one, recover_s=2),
    "kill-all": Fault(kill_all, recover_s=15, may_fail=True),
    "kill-gateway": Fault(kill_gateway, recover_s=5, may_fail=True, may_cut=True),
    "stop-worker": Fault(stop_worker, recover_s=10),
    "hiccup": Fault(hiccup, recover_s=2),
    "partition": Fault(partition, recover_s=10),
    "partition-there": Fault(partition_there, recover_s=10),
    "partition-back": Fault(partition_back, recover_s=10),
    "flapping": Fault(flapping, recover_s=10),
    "reset": Fault(reset, recover_s=2),
    "half-close": Fault(half_close, recover_s=2),
    "truncated": Fault(truncated, recover_s=2),
    "slow-link": Fault(slow_link, recover_s=2),
    "drain-worker": Fault(drain_worker, recover_s=2),
    "rolling-upgrade": Fault(rolling_upgrade, recover_s=2),
    "deadly-request": Fault(deadly_request, recover_s=2),
    "clients-leave": Fault(clients_leave, recover_s=2),
}

# With prompts and answers at different workers. Of the two of a role one always lives, or all may fail.
_ON_PAIRS = [row for row in ROWS if row != "kill-all-but-one"]
ROWS |= {f"pairs-{row}": replace(ROWS[row], roles=PAIRS) for row in _ON_PAIRS}
# A deadly request may take two prefill workers with it, so that its neighbours need a third.
ROWS["pairs-deadly-request"] = replace(ROWS["pairs-deadly-request"], roles=("prefill", *PAIRS))
