"""CPU time of the gateway process for a short request and for a streamed token, through the real wire.

The worker is the fake runner, which answers at once. The gateway's user and system time is read from the kernel before
and after; what client and worker spend is not counted. A streamed token's cost is the slope between short and long
streams at the same number of clients, so that what a request costs anyway falls out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness.processes import Gateway, serve_arguments
from report import Bar, Plot, write

REQUEST_LIMIT_US = 300.0
TOKEN_LIMIT_US = 10.0
# The bar is for a loaded gateway: a step's frame then carries many tokens.
LOADED_CLIENTS = 256
CLIENTS = (1, 8, 64, LOADED_CLIENTS)
SHORT_TOKENS, LONG_TOKENS = 100, 600


async def post(address: tuple[str, int], body: bytes, times: int) -> int:
    """Sends one request after another on one connection and returns how many bytes came back."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: bench", "content-type: application/json"]
    request = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body
    received = 0
    for _ in range(times):
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the gateway answered {status!r}")
        received += await read_body(reader)
    writer.close()
    await writer.wait_closed()
    return received


async def read_body(reader: asyncio.StreamReader) -> int:
    """Reads headers and body, of either transfer encoding, and returns the body's length."""
    headers = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in headers.split(b"\r\n") if b": " in line)
    if b"content-length" in fields:
        return len(await reader.readexactly(int(fields[b"content-length"])))
    received = 0
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
        received += size
    await reader.readline()
    return received


def chat(max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "What does a baleen whale eat, and how much of it in a day?"}]
    body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    return json.dumps(body).encode()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(gateway: Gateway, body: bytes, *, clients: int, times: int) -> dict[str, float]:
    """Gateway CPU seconds and wall seconds while `clients` connections send `times` requests each."""
    process = psutil.Process(gateway.pid)
    address = ("127.0.0.1", gateway.listening_port())

    async def load() -> None:
        await asyncio.gather(*(post(address, body, times) for _ in range(clients)))

    before, started = cpu_seconds(process), time.monotonic()
    asyncio.run(load())
    return {"cpu_s": cpu_seconds(process) - before, "wall_s": time.monotonic() - started}


def measure_requests(gateway: Gateway, clients: int, total: int) -> dict[str, Any]:
    """A short request: a chat message in, one token out, one JSON answer."""
    times = max(1, total // clients)
    used = measure(gateway, chat(1, stream=False), clients=clients, times=times)
    return {
        "clients": clients,
        "requests": clients * times,
        "requests_per_s": round(clients * times / used["wall_s"], 1),
        "cpu_us_per_request": round(used["cpu_s"] / (clients * times) * 1e6, 2),
    }


def measure_tokens(gateway: Gateway, clients: int, total: int) -> dict[str, Any]:
    """A streamed token, as the slope between two lengths."""
    times = max(1, total // (clients * LONG_TOKENS))
    short = measure(gateway, chat(SHORT_TOKENS, stream=True), clients=clients, times=times)
    long = measure(gateway, chat(LONG_TOKENS, stream=True), clients=clients, times=times)
    tokens = clients * times * (LONG_TOKENS - SHORT_TOKENS)
    return {
        "clients": clients,
        "tokens": tokens,
        "tokens_per_s": round(clients * times * LONG_TOKENS / long["wall_s"]),
        "cpu_us_per_token": round((long["cpu_s"] - short["cpu_s"]) / tokens * 1e6, 3),
    }


def main() -> None:
    """Measures at several numbers of clients, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="short requests per point, at most")
    parser.add_argument("--tokens", type=int, default=600_000, help="streamed tokens per point, at most")
    arguments = parser.parse_args()
    with Gateway(*serve_arguments("fake", "--max-total-tokens", "1048576")) as gateway:
        gateway.ready()
        measure(gateway, chat(1, stream=False), clients=8, times=50)
        # A few clients are slow, and need no more work for hundreds of milliseconds of CPU time.
        requests = [measure_requests(gateway, n, min(arguments.requests, 4000 * n)) for n in CLIENTS]
        tokens = [measure_tokens(gateway, n, min(arguments.tokens, 40_000 * n)) for n in CLIENTS]
    bars = [
        Bar(
            f"CPU of a short request, {LOADED_CLIENTS} clients",
            requests[-1]["cpu_us_per_request"],
            REQUEST_LIMIT_US,
            "µs",
        ),
        Bar(f"CPU of a streamed token, {LOADED_CLIENTS} streams", tokens[-1]["cpu_us_per_token"], TOKEN_LIMIT_US, "µs"),
    ]
    plot = Plot(
        title="CPU of the gateway process per streamed token",
        x_label="concurrent streams",
        y_label="µs",
        series={"gateway": [(row["clients"], row["cpu_us_per_token"]) for row in tokens]},
        limit=TOKEN_LIMIT_US,
        log_x=True,
    )
    write("gateway_cpu", {"short_requests": requests, "streamed_tokens": tokens}, bars, plot)


if __name__ == "__main__":
    main()
