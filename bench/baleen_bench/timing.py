"""Times GPU work: medians over replays of a CUDA graph, so that the host's launches do not count. Also the ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

_REPLAYS = 15
# One graph holds about this much work, so that events resolve it.
_TARGET_US = 400.0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine reaches on simple work: copy in TB/s (read and written), matrix products in TFLOP/s."""

    copy_tb_s: float
    bf16_tflops: float
    fp8_tflops: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call within a graph. The call must not synchronise."""
    once = _replayed(call, 1)
    repeats = max(1, min(50, int(_TARGET_US / max(once, 1.0))))
    return once if repeats == 1 else _replayed(call, repeats)


def _replayed(call: Callable[[], object], repeats: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                call()
    torch.cuda.synchronize()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Random data throughout: zeros run faster. The copy is a kernel; in a graph a plain copy would be an engine's."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 4 * source.numel() / microseconds(lambda: torch.mul(source, 1, out=target)) / 1e6
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * size**3 / microseconds(lambda: a @ b) / 1e6
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    one = torch.ones((), device="cuda")
    scaled = microseconds(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16))  # pyright: ignore[reportPrivateImportUsage]
    return Ceilings(copy, bf16, 2 * size**3 / scaled / 1e6)
