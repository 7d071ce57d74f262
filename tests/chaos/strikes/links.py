"""Faults of links: from the gateway to a worker, and from decode workers to the pages of a prefill worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal

from baleen_worker.fake_pages import PAGE_BYTES
from chaos.proxy import FaultProxy
from chaos.stack import Stack, Strike
from chaos.strikes.workers import LONG_SILENCE_S

# Draws one of the links of its kind.
Link = Callable[[Stack, random.Random], FaultProxy]


def to_worker(stack: Stack, g: random.Random) -> FaultProxy:
    """From the gateway to some worker."""
    return g.choice(stack.members).proxy


def to_pages(stack: Stack, g: random.Random) -> FaultProxy:
    """From decode workers to the pages of some prefill worker."""
    proxies = [member.pages for member in stack.members if member.pages is not None]
    return g.choice(proxies)


def blocked(link: Link, *ways: Literal["there", "back"]) -> Strike:
    """Nothing passes in these directions, in both if none is named, for longer than anybody waits."""

    async def strike(stack: Stack, g: random.Random) -> None:
        proxy = link(stack, g)
        proxy.block(*(proxy.there if way == "there" else proxy.back for way in ways))
        await asyncio.sleep(LONG_SILENCE_S)
        proxy.heal()

    return strike


async def flapping(stack: Stack, g: random.Random) -> None:
    proxy = to_worker(stack, g)
    for _ in range(8):
        proxy.block()
        await asyncio.sleep(g.uniform(0.05, 0.5))
        proxy.heal()
        if g.random() < 0.3:
            proxy.cut()
        await asyncio.sleep(g.uniform(0.05, 0.5))


async def reset(stack: Stack, g: random.Random) -> None:
    for _ in range(3):
        to_worker(stack, g).cut()
        await asyncio.sleep(g.uniform(0.1, 0.6))


async def half_close(stack: Stack, g: random.Random) -> None:
    to_worker(stack, g).half_close()
    await asyncio.sleep(1.0)


async def truncated(stack: Stack, g: random.Random) -> None:
    proxy = to_worker(stack, g)
    g.choice([proxy.there, proxy.back]).cut_after_bytes = g.randrange(1, 4000)
    await asyncio.sleep(2.0)


async def slow_link(stack: Stack, g: random.Random) -> None:
    proxy = to_worker(stack, g)
    for direction in (proxy.there, proxy.back):
        direction.slice_bytes, direction.delay_s = g.randrange(1, 9), g.uniform(0.0, 0.05)
    await asyncio.sleep(2.0)
    proxy.heal()


# --- pages -----------------------------------------------------------------------------------------------------------


async def pages_late(stack: Stack, g: random.Random) -> None:
    pages = to_pages(stack, g)
    pages.there.delay_s, pages.back.delay_s = g.uniform(0.0, 0.2), g.uniform(0.05, 0.3)
    await asyncio.sleep(3.0)
    pages.heal()


async def pages_cut(stack: Stack, g: random.Random) -> None:
    """Cut in the middle of what is sent, again and again."""
    pages = to_pages(stack, g)
    for _ in range(6):
        pages.back.cut_after_bytes = g.randrange(1, 5_000)
        await asyncio.sleep(g.uniform(0.1, 0.5))
    pages.heal()


async def pages_reset(stack: Stack, g: random.Random) -> None:
    for _ in range(6):
        to_pages(stack, g).cut()
        await asyncio.sleep(g.uniform(0.05, 0.4))


async def pages_sliced(stack: Stack, g: random.Random) -> None:
    pages = to_pages(stack, g)
    pages.there.slice_bytes, pages.back.slice_bytes = g.randrange(1, 9), g.randrange(16, 256)
    await asyncio.sleep(3.0)
    pages.heal()


async def pages_corrupt(stack: Stack, g: random.Random) -> None:
    """A byte of a page is changed, or one of whatever comes next in either direction, again and again."""
    for turn in range(16):
        pages = to_pages(stack, g)
        direction = pages.back if turn % 2 else g.choice([pages.back, pages.there])
        direction.corrupt_next, direction.corrupt_least_bytes = True, PAGE_BYTES if turn % 2 else 0
        await asyncio.sleep(g.uniform(0.1, 0.4))
        pages.heal()


async def pages_slow(stack: Stack, g: random.Random) -> None:
    """A hundredth of what it was, or less."""
    pages = to_pages(stack, g)
    pages.back.bytes_per_s = g.uniform(20e3, 200e3)
    await asyncio.sleep(5.0)
    pages.heal()


async def pages_half_closed(stack: Stack, g: random.Random) -> None:
    for _ in range(4):
        to_pages(stack, g).half_close()
        await asyncio.sleep(g.uniform(0.1, 0.5))


async def pages_refused(stack: Stack, g: random.Random) -> None:
    """Whoever connects is sent away."""
    pages = to_pages(stack, g)
    pages.refuses = True
    pages.cut()
    await asyncio.sleep(g.uniform(1.0, 5.0))
    pages.heal()
