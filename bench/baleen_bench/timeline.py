"""What the GPU does in one decode step, kernel by kernel: when each starts, how long it takes, and the gap before it.

Times of kernels alone do not explain the time of a step: between two of them lies a launch, and what runs beside
another is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel on the device: microseconds since the first of the step."""

    name: str
    start: float
    duration: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.duration


def record(run: Callable[[], None]) -> list[Span]:
    """All kernels of a call, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    if not events:
        return []
    first = min(event.time_range.start for event in events)
    spans = [
        Span(event.name, event.time_range.start - first, event.time_range.elapsed_us(), event.device_resource_id)
        for event in events
    ]
    return sorted(spans, key=lambda span: span.start)


def last_step(spans: Sequence[Span], *, ends_with: str) -> Sequence[Span]:
    """The kernels after the last but one of that name, up to the last."""
    ends = [number for number, span in enumerate(spans) if ends_with in span.name]
    return spans[ends[-2] + 1 : ends[-1] + 1] if len(ends) > 1 else spans


def gaps_after(spans: Sequence[Span], name: str) -> list[float]:
    """Microseconds between the end of each kernel of that name and the start of the next kernel of any."""
    return [max(0.0, b.start - a.end) for a, b in pairwise(spans) if name in a.name]


def busy_us(spans: Sequence[Span]) -> float:
    """Time during which at least one kernel runs."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total


def table(spans: Sequence[Span]) -> Iterator[str]:
    """The spans as lines: start, duration, gap, name, in microseconds; sums first."""
    if not spans:
        return
    length = spans[-1].end - spans[0].start
    yield f"{len(spans)} kernels, {length:.0f} us from first to last, {busy_us(spans):.0f} us of them busy"
    until = spans[0].start
    for span in spans:
        yield f"{span.start - spans[0].start:9.1f} {span.duration:8.2f} {span.start - until:7.2f} {span.name[:110]}"
        until = max(until, span.end)
