"""Faults of requests and clients: they leave, read nothing, want everything, or kill whoever computes them."""

from __future__ import annotations

import asyncio
import random
import socket

import httpx
from chaos.proxy import RESET
from chaos.stack import DEADLY_TOKEN_ID, Stack
from chaos.strikes.workers import start_again

# Workers that one request may take with it before it is refused.
MAX_DEATHS = 2
UNPROCESSABLE = 422


def _endless(g: random.Random) -> bytes:
    """A request with a long answer, as it goes over the wire."""
    body = b'{"model":"micro","prompt":[%d,7,8,9],"max_tokens":4000,"stream":true}' % g.randrange(3, 2000)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(body) + body


async def clients_leave(stack: Stack, g: random.Random) -> None:
    """Requests whose clients are gone after a moment: some reset, some say good-bye, some never read."""
    silent: list[asyncio.StreamWriter] = []
    for _ in range(60):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(_endless(g))
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
            await start_again(stack, *dead)
            await stack.all_ready(30.0)
            if len(dead) > MAX_DEATHS:
                raise AssertionError(f"one request took {len(dead)} workers with it")


async def deadly_fifty(stack: Stack, g: random.Random) -> None:
    """One deadly request, sent fifty times."""
    prompt = [DEADLY_TOKEN_ID, *(g.randrange(3, 2000) for _ in range(8))]
    statuses: list[int] = []
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        for _ in range(50):
            response = await http.post("/v1/completions", json={"model": "micro", "prompt": prompt, "max_tokens": 4})
            statuses.append(response.status_code)
    dead = [member for member in stack.members if not member.is_alive()]
    await start_again(stack, *dead)
    if len(dead) > MAX_DEATHS:
        raise AssertionError(f"one request took {len(dead)} workers with it")
    if statuses[-1] != UNPROCESSABLE:
        raise AssertionError(f"a deadly request was answered with {statuses}")


async def pool_exhausted(stack: Stack, g: random.Random) -> None:
    """Requests that together want many times the pages that there are, among those of the others."""
    wishes = [(g.randrange(500, 3000), g.randrange(500, 2500)) for _ in range(12)]
    await asyncio.gather(*(stack.crowd.ask_for(*wish, g) for wish in wishes))


async def slow_readers(stack: Stack, g: random.Random) -> None:
    """Clients that take a byte now and then of an answer that grows without end."""
    readers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for _ in range(8):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", stack.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=1)
        writer.write(_endless(g))
        readers.append((reader, writer))
    for _ in range(6):
        for reader, _ in readers:
            await reader.read(1)
        await asyncio.sleep(1.0)
    for _, writer in readers:
        writer.transport.abort()
