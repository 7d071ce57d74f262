"""What a handover costs between two GPUs of one host, one process each: `cuda_ipc`, without a model.

Pools of the released size (61 layers); a prompt of 32K tokens in chunks of 8K. The prefill side multiplies matrices
before it offers a chunk, a tenth of a second, which is far less than a real chunk takes; what is measured begins when
the last chunk is computed and ends when the decode side may go on. Rate: all chunks are announced before any is read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baleen_worker.transfer.tcp import TcpTransfer
    from cuda_peer import PrefillProcess

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "worker"), str(ROOT / "kernels"), str(ROOT / "worker/tests/run"), str(ROOT / "bench")]

PROMPT_PAGES, CHUNK_PAGES, LAYERS = 512, 128, 61
COMPUTE_MS = 100.0
LIMITS_MS = {"bfloat16": 5.0, "fp8_e4m3": 3.0}
LEAST_GB_PER_S = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a handover between two GPUs.")
    parser.add_argument("--devices", default="0,1", help="of the prefill and the decode side (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the result there too")
    parser.add_argument("--commit", default="", help="what the result says it was measured at, where there is no git")
    arguments = parser.parse_args()
    first, second = arguments.devices.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = second  # each side sees its own device alone, as deployed
    measured = {name: measure(name, first, arguments.repeats) for name in LIMITS_MS}
    from report import Bar, hardware

    bars = [
        Bar(f"handover after the last chunk of a 32K prompt, {name}", measured[name]["handover_ms"], limit, "ms")
        for name, limit in LIMITS_MS.items()
    ]
    bars += [
        Bar(f"time of a GB between two GPUs, {name}", 1000 / measured[name]["gb_per_s"], 1000 / LEAST_GB_PER_S, "ms")
        for name in LIMITS_MS
    ]
    result = {
        "benchmark": "transfer_gpu",
        "command": f"python bench/transfer_gpu.py --devices {arguments.devices}",
        "commit": arguments.commit,
        "uncommitted_changes": False,
        "hardware": hardware() | {"gpus": len({first, second})},
        "bars": [asdict(bar) | {"met": bar.met} for bar in bars],
        "measurements": measured,
    }
    text = json.dumps(result, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", "utf-8")
    print(text)


def measure(latent_format: str, visible: str, repeats: int) -> dict[str, Any]:
    """Handovers, transfers and bare copies of one format."""
    import torch
    from baleen_worker.cache.page_bytes import PoolPages
    from baleen_worker.transfer.actions import Timers
    from baleen_worker.transfer.cuda_ipc import CudaIpc
    from baleen_worker.transfer.lending import Backend
    from baleen_worker.transfer.reading import Reading
    from baleen_worker.transfer.tcp import TcpTransfer
    from cuda_peer import DECODE, SWITCH_S, PrefillProcess, make_layout, make_pools

    sys.setswitchinterval(SWITCH_S)
    layout = make_layout(LAYERS, latent_format)
    num_pages = PROMPT_PAGES + 1
    with PrefillProcess(layout, num_pages, visible) as prefill:
        pools = make_pools(layout, num_pages, torch.device("cuda", 0))
        store = PoolPages(pools)
        lender = CudaIpc(store)
        transfer = TcpTransfer(
            store, lambda _: 1, DECODE, Timers(), vocab_size=10, listen=None, reading=Reading(Backend.CUDA_IPC, lender)
        )
        num_bytes = PROMPT_PAGES * store.page_bytes
        began_s = time.monotonic()
        mapped = lender.borrow(prefill.ask("lend"))
        mapping_ms = 1000 * (time.monotonic() - began_s)
        pages = list(range(1, num_pages))
        handovers, rates = list[float](), list[float]()
        for number in range(repeats + 1):
            handovers.append(handover(transfer, prefill, number, pages).took_ms)
            rates.append(num_bytes / _whole(transfer, prefill, 1000 + number, pages) / 1e9)
        filling_s = median(timed(mapped.fill, pages, pages) for _ in range(5))
        assert store.device is not None, "the pools are not on a GPU"
        digest_ms = 1000 * median(timed(store.device.digests, pages) for _ in range(5))
        transfer.close()
        mapped.close()
    return {
        "handover_ms": median(handovers[1:]),
        "handovers_ms": handovers,
        "gb_per_s": median(rates[1:]),
        "rates_gb_per_s": rates,
        "prompt_mb": num_bytes / 1e6,
        "filling_gb_per_s": num_bytes / filling_s / 1e9,
        "digests_of_a_prompt_ms": digest_ms,
        "first_mapping_ms": mapping_ms,
    }


@dataclass(frozen=True, slots=True)
class Handover:
    """When the last chunk was computed, and when all pages and the first token had arrived, by the host's clock."""

    computed_s: float
    arrived_s: float

    @property
    def took_ms(self) -> float:
        """Milliseconds."""
        return 1000 * (self.arrived_s - self.computed_s)


def handover(
    transfer: TcpTransfer, prefill: PrefillProcess, number: int, pages: list[int], compute_ms: float = COMPUTE_MS
) -> Handover:
    """One prompt, with so much computing before each chunk."""
    key = number.to_bytes(16, "big")
    _expect(transfer, prefill, key, pages, compute_ms)
    arrived_s = _receive(transfer, key, pages)
    return Handover(prefill.answer(), arrived_s)


def _whole(transfer: TcpTransfer, prefill: PrefillProcess, number: int, pages: list[int]) -> float:
    """Seconds for a prompt that has been computed long ago."""
    key = number.to_bytes(16, "big")
    _expect(transfer, prefill, key, pages, 0.0)
    time.sleep(0.1)  # until all of it is announced
    began_s = time.monotonic()
    arrived_s = _receive(transfer, key, pages)
    prefill.answer()
    return arrived_s - began_s


def _expect(transfer: TcpTransfer, prefill: PrefillProcess, key: bytes, pages: list[int], compute_ms: float) -> None:
    from baleen_worker.transfer.orders import Expect, Peer
    from cuda_peer import PREFILL

    prefill.start("prompt", key, pages, CHUNK_PAGES, compute_ms)
    transfer.give([Expect((key, 0), Peer(prefill.address, PREFILL.boot_epoch, 0), len(pages), 0)])
    _wait(transfer, "Begun")


def _receive(transfer: TcpTransfer, key: bytes, pages: list[int]) -> float:
    """When all pages were there."""
    from baleen_worker.transfer.orders import Receive

    transfer.give([Receive((key, 0), 0, pages)])
    return _wait(transfer, "Arrived")


def _wait(transfer: TcpTransfer, report: str) -> float:
    """When that was told; nothing else may be."""
    while True:
        for news in transfer.take():
            now_s, told = time.monotonic(), getattr(news, "report", news)
            if type(told).__name__ != report:
                raise RuntimeError(f"the transfer ended with {news}")
            return now_s
        transfer.wait(1.0)


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    """Seconds for a call and, where it only starts something, for that."""
    began_s = time.perf_counter()
    result = call(*arguments)
    if callable(result):
        result()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
