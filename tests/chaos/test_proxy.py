"""The proxy does to a connection what it says, between real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from chaos.proxy import FaultProxy

BLINK_S = 0.2

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_echo(check: Callable[[FaultProxy, Client], Awaitable[None]]) -> None:
    """Runs `check` with a proxy before a server that echoes, and a client connected through it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server, FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            try:
                await asyncio.wait_for(check(proxy, (reader, writer)), 20)
            finally:
                writer.transport.abort()

    asyncio.run(run())


def test_it_forwards() -> None:
    async def check(_: FaultProxy, client: Client) -> None:
        reader, writer = client
        writer.write(b"x" * 300_000)
        assert await reader.readexactly(300_000) == b"x" * 300_000

    with_echo(check)


@pytest.mark.parametrize("one_way", ["there", "back"])
def test_what_is_blocked_comes_later(one_way: str) -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        proxy.block(getattr(proxy, one_way))
        writer.write(b"whale")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), BLINK_S)
        proxy.heal()
        assert await reader.readexactly(5) == b"whale"

    with_echo(check)


def test_a_cut_is_a_reset() -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        writer.write(b"whale")
        await reader.readexactly(5)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)

    with_echo(check)


def test_a_frame_is_cut_in_the_middle() -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        proxy.back.cut_after_bytes = 3
        writer.write(b"whale")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)) as caught:
            await reader.readexactly(5)
        assert len(getattr(caught.value, "partial", b"")) <= 3

    with_echo(check)


def test_half_a_close_lets_answers_through() -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        writer.write(b"whale")
        await reader.readexactly(5)
        proxy.half_close()
        assert await reader.read() == b""  # the server has seen the end, and ended too

    with_echo(check)


def test_one_byte_is_changed() -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        proxy.there.corrupt_next = True
        writer.write(b"whale")
        found = await reader.readexactly(5)
        assert sum(a != b for a, b in zip(found, b"whale", strict=True)) == 1

    with_echo(check)


def test_bulk_alone_is_changed() -> None:
    async def check(proxy: FaultProxy, client: Client) -> None:
        reader, writer = client
        proxy.there.corrupt_next, proxy.there.corrupt_least_bytes = True, 1000
        writer.write(b"whale")
        assert await reader.readexactly(5) == b"whale"
        writer.write(b"x" * 1000)
        found = await reader.readexactly(1000)
        assert sum(byte != ord("x") for byte in found) == 1

    with_echo(check)


def test_whoever_connects_is_sent_away_until_it_is_healed() -> None:
    async def check(proxy: FaultProxy, _: Client) -> None:
        proxy.refuses = True
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()
        proxy.heal()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"whale")
        assert await reader.readexactly(5) == b"whale"
        writer.transport.abort()

    with_echo(check)
