"""What a handover costs: the rate at which pages travel over TCP, and the time added to the first token.

Rate, without a model: pages of the released size (61 layers, FP8) go from one process to another, digests,
generations and acknowledgements included; in turn, as many bytes go over a bare socket, from one buffer to another.
Added time: prompts of 1K tokens that nothing knows go to a prefill and a decode worker, one at a time, in turn with
whole requests to the decode worker. Where nothing is computed (the fake runner), the difference is the handover's own.
With the micro model a prompt takes a second of a processor, give or take more than the handover lasts: that is written
down with its spread, and no limit can be held against it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "worker/tests/core"))

import torch
from baleen_worker.cache.page_bytes import PoolPages
from baleen_worker.cache.storage import FP8, KvLayout, PagedPools
from baleen_worker.transfer.actions import Arrived, Begun, Timers
from baleen_worker.transfer.messages import Final
from baleen_worker.transfer.orders import Expect, Finish, LegNews, Offer, Open, Peer, Receive
from baleen_worker.transfer.tcp import TcpTransfer
from baleen_worker.transfer.wire import Identity
from pair import Pair
from report import Bar, write
from worker_process import MODEL, WorkerProcess

LAYOUT = KvLayout(61, (True,) * 61, 512, 64, 128, FP8, FP8, index_hadamard=True, model_digest="0" * 64)
NUM_PAGES = 128
PROMPT_TOKENS = 1024
_BUFFER_BYTES = 4 << 20
_OWN, _PEER = Identity("bench", 1), Identity("bench", 2)
_MODEL = ("--runner", "model", "--device", "cpu", "--max-total-tokens", "65536")
_FAKE = ("--runner", "fake", "--max-total-tokens", "65536")


def make_pools() -> PoolPages:
    """Pools of so many pages, every byte of which has been written once."""
    pools = PagedPools(LAYOUT, NUM_PAGES + 1, device=torch.device("cpu"), dtype=torch.bfloat16)
    for layer in range(LAYOUT.num_layers):
        for store in pools.page_stores(layer):
            store.random_(0, 255)
    return PoolPages(pools)


def serve_pages(pipe: Connection) -> None:
    """The prefill side, in a process of its own: offers all pages under each key that it is told."""
    transfer = TcpTransfer(make_pools(), lambda _: 1, _OWN, Timers(), vocab_size=10, listen=("127.0.0.1", 0))
    pipe.send(transfer.address)
    pages = list(range(1, NUM_PAGES + 1))
    while (key := pipe.recv()) is not None:
        final = Finish((key, 0), Final(1, 0, NUM_PAGES))
        transfer.give([Open((key, 0)), Offer((key, 0), 0, pages, [1] * NUM_PAGES), final])
    transfer.close()


def send_bytes(pipe: Connection) -> None:
    """The sending end of a bare socket, in a process of its own."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        while (num_bytes := pipe.recv()) is not None:
            with server.accept()[0] as peer:
                while num_bytes > 0:
                    peer.sendall(buffer[:num_bytes])
                    num_bytes -= _BUFFER_BYTES


def fetch_pages(transfer: TcpTransfer, pipe: Connection, address: str, number: int) -> float:
    """Seconds from the first page asked for to the last one stored."""
    key = (number.to_bytes(16, "big"), 0)
    pipe.send(key[0])
    transfer.give([Expect(key, Peer(address, _OWN.boot_epoch, 0), NUM_PAGES, 0)])
    began_s = 0.0
    while True:
        for news in transfer.take():
            match news:
                case LegNews(_, Begun()):
                    began_s = time.perf_counter()
                    transfer.give([Receive(key, 0, range(1, NUM_PAGES + 1))])
                case LegNews(_, Arrived()):
                    return time.perf_counter() - began_s
                case _:
                    raise RuntimeError(f"the transfer ended with {news}")
        transfer.wait(1.0)


def receive_bytes(pipe: Connection, port: int, num_bytes: int) -> float:
    """Seconds for so many bytes over a bare socket."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    pipe.send(num_bytes)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        began_s = time.perf_counter()
        while num_bytes > 0:
            num_bytes -= peer.recv_into(buffer)
        return time.perf_counter() - began_s


def measure_rate(repeats: int) -> dict[str, float]:
    """GB/s of both, taken in turn; medians."""
    pools = make_pools()
    num_bytes = NUM_PAGES * pools.page_bytes
    spawn = multiprocessing.get_context("spawn")
    (ours, theirs), (plain, far) = spawn.Pipe(), spawn.Pipe()
    sides = [spawn.Process(target=serve_pages, args=(theirs,)), spawn.Process(target=send_bytes, args=(far,))]
    for side in sides:
        side.start()
    address, port = ours.recv(), plain.recv()
    transfer = TcpTransfer(pools, lambda _: 1, _PEER, Timers(), vocab_size=10, listen=None)
    pages_s, bytes_s = list[float](), list[float]()
    for number in range(repeats + 1):
        pages_s.append(fetch_pages(transfer, ours, address, number))
        bytes_s.append(receive_bytes(plain, port, num_bytes))
    ours.send(None)
    plain.send(None)
    for side in sides:
        side.join()
    transfer.close()
    rate, plain_rate = (num_bytes / median(times[1:]) / 1e9 for times in (pages_s, bytes_s))  # the first warms up
    return {"pages_gb_per_s": rate, "bare_socket_gb_per_s": plain_rate, "mb_per_transfer": num_bytes / 1e6}


def measure_first_token(repeats: int, flags: Sequence[str]) -> dict[str, float]:
    """Milliseconds from the submission of both legs, or of a whole request, to the first token.

    Medians, and how far the middle half of the whole requests lies apart.
    """
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
    with (
        WorkerProcess(MODEL, *flags, *prefill) as first,
        WorkerProcess(MODEL, *flags, "--disaggregation-mode", "decode") as second,
        Pair(first, second) as pair,
    ):
        times_ms: dict[str, list[float]] = {"pair": [], "alone": []}
        draw = random.Random(1)
        stream = pair.decode.stream
        for key in range(1, 2 * repeats + 5):
            how = "pair" if key % 2 else "alone"
            prompt = [draw.randrange(20, 2000) for _ in range(PROMPT_TOKENS)]
            prefill_leg, decode_leg = pair.submits(key, prompt, 2)
            if how == "alone":
                decode_leg.ClearField("disaggregation")
            began_s = time.perf_counter()
            stream.send(submits=[decode_leg])
            if how == "pair":
                pair.prefill.stream.send(submits=[prefill_leg])
            stream.read_until(lambda key=key: bool(stream.tokens.get(key)))
            times_ms[how].append(1000 * (time.perf_counter() - began_s))
            stream.read_until(lambda key=key: key in stream.ended)
            if how == "pair":
                pair.prefill.stream.read_until(lambda key=key: key in pair.prefill.stream.ended)
    both, alone = (median(times_ms[how][2:]) for how in ("pair", "alone"))
    low, _, high = quantiles(times_ms["alone"][2:], n=4)
    return {"pair_ms": both, "alone_ms": alone, "added_ms": both - alone, "spread_ms": high - low}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a handover costs.")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each kind (default %(default)s)")
    arguments = parser.parse_args()
    rate = measure_rate(arguments.repeats)
    first_token = measure_first_token(4 * arguments.repeats, _FAKE)
    on_the_model = measure_first_token(arguments.repeats, _MODEL)
    share = rate["bare_socket_gb_per_s"] / rate["pages_gb_per_s"]
    bars = [
        Bar("time of a transfer of pages over that of a bare socket's bytes", share, 1 / 0.7, "ratio"),
        Bar("time that a handover adds to the first token of a 1K prompt", first_token["added_ms"], 10.0, "ms"),
    ]
    write("transfer", {"rate": rate, "first_token": first_token, "first_token_of_the_micro_model": on_the_model}, bars)


if __name__ == "__main__":
    main()
