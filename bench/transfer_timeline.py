"""Where the time of a handover between two GPUs goes: the steps after a prompt's last chunk, in variants side by side.

Each variant has processes of its own; contents are compared bit by bit before anything is measured. The steps are those
that `transfer_marks` marks, in milliseconds from the end of the last chunk's computing, medians of all repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import transfer_gpu
from transfer_gpu import CHUNK_PAGES, LAYERS, LIMITS_MS, PROMPT_PAGES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Variant:
    """`options`: of both sides; `parts` of a read, `compute_ms` before each chunk.

    "late": nothing is told before it is digested; "awake": neither side's loop ever sleeps; "warm": the decode side's
    GPU works all the time.
    """

    name: str
    options: tuple[str, ...] = ()
    parts: int = 4
    compute_ms: float = 40.0


VARIANTS = (
    Variant("as it is", compute_ms=transfer_gpu.COMPUTE_MS),
    Variant("one part, late", ("late",), parts=1),
    Variant("late", ("late",)),
    Variant("eight parts", parts=8),
    Variant("awake", ("awake",)),
    Variant("warm", ("warm",)),
    Variant("awake, warm", ("awake", "warm")),
    Variant("short pauses", compute_ms=4.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the steps of a handover between two GPUs.")
    parser.add_argument("--devices", default="0,1", help="of the prefill and the decode side (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--formats", nargs="*", default=[*LIMITS_MS])
    parser.add_argument("--variants", nargs="*", default=[variant.name for variant in VARIANTS])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    first, second = arguments.devices.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = second
    from transfer_marks import watch

    watch("decode")
    measured: dict[str, Any] = {}
    for latent_format in arguments.formats:
        measured[latent_format] = {"kernels": kernels_alone(latent_format)}
        for variant in VARIANTS:
            if variant.name in arguments.variants:
                found = measure(variant, latent_format, first, arguments.repeats)
                measured[latent_format][variant.name] = found
                arguments.out.write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
                show(latent_format, variant, found)


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


def measure(variant: Variant, latent_format: str, visible: str, repeats: int) -> dict[str, Any]:
    """The handovers of a variant and the steps of them."""
    import torch
    import transfer_marks
    from baleen_worker.cache import device_pages
    from baleen_worker.cache.page_bytes import PoolPages
    from baleen_worker.transfer.actions import Timers
    from baleen_worker.transfer.cuda_ipc import CudaIpc
    from baleen_worker.transfer.lending import Backend, Reading
    from baleen_worker.transfer.tcp import TcpTransfer
    from cuda_peer import DECODE, SWITCH_S, PrefillProcess, make_layout, make_pools

    sys.setswitchinterval(SWITCH_S)
    device_pages._PARTS = variant.parts  # pyright: ignore[reportPrivateUsage]
    layout, num_pages = make_layout(LAYERS, latent_format), PROMPT_PAGES + 1
    with PrefillProcess(layout, num_pages, visible) as prefill:
        prefill.ask("watch", [*variant.options])
        pools = make_pools(layout, num_pages, torch.device("cuda", 0))
        store = PoolPages(pools)
        reading = Reading(Backend.CUDA_IPC, CudaIpc(store))
        transfer = TcpTransfer(store, lambda _: 1, DECODE, Timers(), vocab_size=10, listen=None, reading=reading)
        if "awake" in variant.options:
            transfer_marks.stay_awake(transfer)
        stop = threading.Event()
        warming = threading.Thread(target=_work, args=(stop,))
        if "warm" in variant.options:
            warming.start()
        pages = list(range(1, num_pages))
        handovers, steps = list[float](), dict[str, list[float]]()
        for number in range(repeats + 2):
            made = transfer_gpu.handover(transfer, prefill, number, pages, variant.compute_ms)
            marks = prefill.ask("marks") + transfer_marks.take()
            if number == 0:
                _check(pools, pages)
            if number > 1:
                handovers.append(made.took_ms)
                _collect(steps, marks, made)
        stop.set()
        if warming.ident is not None:
            warming.join()
        transfer.close()
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


def _work(stop: threading.Event) -> None:
    """Keeps the device busy, as decode steps would."""
    import torch

    matrix: torch.Tensor = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    while not stop.is_set():
        torch.mm(matrix, matrix)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
