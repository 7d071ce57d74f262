"""Where the time of a handover between two GPUs goes: the steps after a prompt's last chunk, in variants side by side.

Contents are compared bit by bit before a variant is measured. The steps are those that `transfer_marks` marks, in
milliseconds from the end of the last chunk's computing, medians of all repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import transfer_gpu
from transfer_gpu import CHUNK_PAGES, LAYERS, LIMITS_MS, PROMPT_PAGES

if TYPE_CHECKING:
    from baleen_worker.transfer.tcp import TcpTransfer

NEVER_S = 3600.0
_IDLE = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


@dataclass(frozen=True, slots=True)
class Variant:
    """`parts` of a read; `compute_ms` before each chunk; `touch_s`: how often links are kept awake.

    Options: "late": nothing is told before it is digested; "warm": the decode side's GPU works all the time; "busy": no
    core ever sleeps, so that threads wake at once.
    """

    name: str
    options: tuple[str, ...] = ()
    parts: int = 4
    compute_ms: float = transfer_gpu.COMPUTE_MS
    touch_s: float = 0.03


VARIANTS = (
    Variant("as it is"),
    Variant("asleep", touch_s=NEVER_S),
    Variant("busy", ("busy",)),
    Variant("40 ms", compute_ms=40.0, touch_s=NEVER_S),
    Variant("warm", ("warm",)),
    Variant("busy, warm", ("busy", "warm")),
    Variant("4 ms", compute_ms=4.0, touch_s=NEVER_S),
    Variant("late", ("late",)),
    Variant("one part", parts=1),
    Variant("eight parts", parts=8),
    Variant("touched often", touch_s=0.005),
    Variant("one part, late, asleep", ("late",), parts=1, touch_s=NEVER_S),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the steps of a handover between two GPUs.")
    parser.add_argument("--devices", default="0,1", help="of the prefill and the decode side (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--formats", nargs="*", default=[*LIMITS_MS])
    parser.add_argument("--variants", nargs="*", default=[variant.name for variant in VARIANTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what the result says it was measured at, where there is no git")
    arguments = parser.parse_args()
    first, second = arguments.devices.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = second
    from cuda_peer import SWITCH_S
    from report import hardware
    from transfer_marks import watch

    watch("decode")
    sys.setswitchinterval(SWITCH_S)
    measured: dict[str, Any] = {}
    result = {
        "benchmark": "transfer_timeline",
        "command": f"python bench/transfer_timeline.py --devices {arguments.devices} --repeats {arguments.repeats}",
        "commit": arguments.commit,
        "hardware": hardware() | {"gpus": len({first, second})},
        "measurements": measured,
    }
    for latent_format in arguments.formats:
        measured[latent_format] = {"kernels": kernels_alone(latent_format)}
        bench = Bench(latent_format, first)
        for variant in VARIANTS:
            if variant.name in arguments.variants:
                found = bench.measure(variant, arguments.repeats)
                measured[latent_format][variant.name] = found
                arguments.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
                show(latent_format, variant, found)
        bench.close()


def show(latent_format: str, variant: Variant, found: dict[str, Any]) -> None:
    """One variant, a line for each step."""
    print(f"\n{latent_format}, {variant.name}: {found['handover_ms']:.3f} ms of {found['handovers_ms']}", flush=True)
    for step, at_ms in sorted(found["steps"].items(), key=lambda entry: entry[1]):
        print(f"  {at_ms:7.3f}  {step}")


def kernels_alone(latent_format: str) -> dict[str, float]:
    """GB/s within one GPU's memory of a chunk's copy with its digests, and the milliseconds of the digests alone."""
    import torch
    from baleen_worker.cache import device_pages
    from cuda_peer import make_layout, make_pools

    device = torch.device("cuda", 0)
    layout = make_layout(LAYERS, latent_format)
    pools = make_pools(layout, 2 * CHUNK_PAGES, device)
    stores = [store for layer in range(LAYERS) for store in pools.page_stores(layer)]
    sources, half = [store.data_ptr() for store in stores], [*range(CHUNK_PAGES)]
    num_bytes = CHUNK_PAGES * sum(store.shape[1] for store in stores)
    found: dict[str, float] = {"chunk_mb": num_bytes / 1e6}
    for parts in (1, 4, 8):
        device_pages._PARTS = parts  # pyright: ignore[reportPrivateUsage]
        pages = device_pages.DevicePoolPages(stores)
        other = [page + CHUNK_PAGES for page in half]
        times = [transfer_gpu.timed(pages.fill, sources, half, other) for _ in range(9)]
        found[f"ms in {parts} parts"] = 1000 * median(times)
        found["ms of digests"] = 1000 * median(transfer_gpu.timed(pages.digests, half) for _ in range(9))
    return found


class Bench:
    """Both sides' pools of one format, and the variants between them."""

    def __init__(self, latent_format: str, visible: str) -> None:
        import torch
        from cuda_peer import PrefillProcess, make_layout, make_pools

        layout, num_pages = make_layout(LAYERS, latent_format), PROMPT_PAGES + 1
        self._prefill = PrefillProcess(layout, num_pages, visible)
        self._prefill.ask("watch")
        self._pools = make_pools(layout, num_pages, torch.device("cuda", 0))
        self._pages = [*range(1, num_pages)]
        self._number = 0

    def close(self) -> None:
        """Ends the other process."""
        self._prefill.kill()

    def measure(self, variant: Variant, repeats: int) -> dict[str, Any]:
        """The handovers of a variant and the steps of them."""
        from baleen_worker.cache import device_pages
        from baleen_worker.cache.page_bytes import PoolPages
        from baleen_worker.transfer import borrowing
        from baleen_worker.transfer.actions import Timers
        from baleen_worker.transfer.cuda_ipc import CudaIpc
        from baleen_worker.transfer.lending import Backend
        from baleen_worker.transfer.reading import Reading
        from baleen_worker.transfer.tcp import TcpTransfer
        from cuda_peer import DECODE

        device_pages._PARTS = variant.parts  # pyright: ignore[reportPrivateUsage]
        borrowing._TOUCH_S = variant.touch_s  # pyright: ignore[reportPrivateUsage]
        self._prefill.ask("choose", [*variant.options])
        store = PoolPages(self._pools)
        reading = Reading(Backend.CUDA_IPC, CudaIpc(store))
        transfer = TcpTransfer(store, lambda _: 1, DECODE, Timers(), vocab_size=10, listen=None, reading=reading)
        try:
            with _busy("busy" in variant.options), _working("warm" in variant.options):
                return self._handovers(transfer, variant.compute_ms, repeats)
        finally:
            transfer.close()

    def _handovers(self, transfer: TcpTransfer, compute_ms: float, repeats: int) -> dict[str, Any]:
        import torch
        import transfer_marks

        handovers, steps = list[float](), dict[str, list[float]]()
        for repeat in range(repeats + 2):
            self._number += 1
            self._pools.poison(self._pages)
            torch.cuda.synchronize()
            made = transfer_gpu.handover(transfer, self._prefill, self._number, self._pages, compute_ms)
            marks = self._prefill.ask("marks") + transfer_marks.take()
            if repeat == 0:
                _check(self._pools, self._pages)
            if repeat > 1:
                handovers.append(made.took_ms)
                _collect(steps, marks, made)
        return {
            "handover_ms": median(handovers),
            "handovers_ms": [round(handover, 2) for handover in handovers],
            "steps": {step: median(times) for step, times in steps.items() if len(times) > repeats // 2},
        }


def _collect(steps: dict[str, list[float]], marks: list[tuple[str, float]], made: transfer_gpu.Handover) -> None:
    """The last chunk's marks: the first of each name after it was computed, and how long the device took for it."""
    seen: dict[str, float] = {}
    for name, at_s in sorted(marks, key=lambda mark: mark[1]):
        if at_s >= made.computed_s:
            seen.setdefault(name, 1000 * (at_s - made.computed_s))
    seen["the engine knows"] = made.took_ms
    device = [at_s for name, at_s in marks if name == "device"]
    if device:
        seen["(the device takes)"] = 1000 * device[-1]
    for name, at_ms in seen.items():
        steps.setdefault(name, []).append(at_ms)


def _check(pools: Any, pages: list[int]) -> None:
    """All pages have come bit by bit."""
    from cuda_peer import contents

    for layer in range(LAYERS):
        for number, store in enumerate(pools.page_stores(layer)):
            assert (store[pages] == contents(layer, number, store)[pages]).all(), f"layer {layer}, store {number}"


@contextlib.contextmanager
def _working(wanted: bool) -> Generator[None]:
    """Keeps the device busy, as decode steps would."""
    import torch

    stop = threading.Event()

    def work() -> None:
        matrix: torch.Tensor = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        while not stop.is_set():
            torch.mm(matrix, matrix)
            time.sleep(0.0005)

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


@contextlib.contextmanager
def _busy(wanted: bool) -> Generator[None]:
    """Keeps all cores from sleeping, by processes that give way to any other."""
    count = len(os.sched_getaffinity(0)) if wanted else 0
    idlers = [subprocess.Popen([sys.executable, "-S", "-c", _IDLE]) for _ in range(count)]
    try:
        yield
    finally:
        for idler in idlers:
            idler.kill()
            idler.wait()


if __name__ == "__main__":
    main()
