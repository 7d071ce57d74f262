"""What decode steps cost without prompts before them: over context length, and how much of the host's work is hidden.

Pools are filled with random keys and the rows' pages given at once, so a batch of long contexts is there in no time.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from baleen_worker.model_runner import ModelRunner
from baleen_worker.request import SamplingParams
from baleen_worker.step import Admission, PlannedRow, StepPlan

from baleen_bench import timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baleen_worker.step import BuiltRunner, StepHandle

PAGE = 64
STEPS = 144
# Rows whose contexts grow: enough that keys weigh more than the experts that a step happens to pick.
BATCH = 32
PASSES = 3
RELEASED_LAYERS = 61
CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
# What a decode step ends with.
LAST_KERNEL = "_keep"


@dataclass(frozen=True, slots=True)
class Line:
    """Least squares of step time over context: milliseconds = base + slope x (1024 tokens of context).

    us_per_query_per_k: of a row and 1024 tokens of its context, in a model of 61 layers.
    """

    base_ms: float
    slope_ms_per_k: float
    r_squared: float
    us_per_query_per_k: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """Of one decode step: the host's own work, the device's idle time before it, and the share of the former that the
    device did not wait for: 1 - idle / host."""

    batch: int
    context: int
    host_us: float
    idle_us: float
    share_hidden: float


def fill_pools(runner: ModelRunner) -> int:
    """Random latents and index keys in every slot, so that scores differ and nothing is not finite. -> layers."""
    pools = runner._pools  # pyright: ignore[reportPrivateUsage]
    for layer in range(pools.layout.num_layers):
        latents = pools.latent_store(layer)
        if latents.dtype == torch.uint8:
            latents[:, :512].random_(0, 64)
            latents[:, 512:528] = torch.full((4,), 0.01, device=latents.device).view(torch.uint8)
            latents[:, 528:] = torch.randn(64, device=latents.device, dtype=torch.bfloat16).view(torch.uint8)
        else:
            latents.normal_()
        pages = pools.index_store(layer)
        width = pages.shape[1] // 33 * 32  # 128 numbers of a byte and a scale of four for each key
        pages[:, :width].random_(0, 80)
        pages[:, width:] = torch.full((PAGE,), 0.01, device=pages.device).view(torch.uint8)
    return pools.layout.num_layers


class SteadyRows:
    """A batch of rows at a context nobody computed."""

    def __init__(self, built: BuiltRunner, batch: int, context: int) -> None:
        """ValueError if the pages do not hold the batch."""
        self._runner, self._batch, self._start = built.runner, batch, context
        per_row = pages_of(context)
        if 1 + batch * per_row > built.num_pages:
            raise ValueError(f"{batch} rows of {context} tokens need {batch * per_row} pages, of {built.num_pages - 1}")
        self._pages = [past + own for past, own in _spread(batch, context // PAGE, built.num_pages)]
        params = SamplingParams(max_tokens=4 * STEPS, seed=0, temperature=0.0)
        self._admissions = [Admission(slot, params) for slot in range(batch)]
        self._step = 0
        self.host_s: list[float] = []

    def run(self, steps: int = STEPS) -> float:
        """Seconds a step, each launched before the one before it is collected."""
        torch.cuda.synchronize()
        started, before = time.perf_counter(), None
        for _ in range(steps):
            handle = self._launch()
            if before is not None:
                before.collect()
            before = handle
        assert before is not None
        before.collect()
        return (time.perf_counter() - started) / steps

    def profiled(self) -> None:
        """Fewer steps, since a profile holds every kernel of each."""
        self.run(STEPS // 3)

    def _launch(self) -> StepHandle:
        first = self._step == 0
        rows = [
            PlannedRow(
                slot=slot,
                start=self._start + self._step,
                token_ids=(17,) if first else (),
                first_new_page=0,
                new_pages=pages if first else [],
                sample=True,
                output_index=self._step + 1,
                from_device=not first,
            )
            for slot, pages in enumerate(self._pages)
        ]
        plan = StepPlan(self._step, self._admissions if first else (), rows)
        self._step += 1
        started = time.perf_counter()
        handle = self._runner.launch(plan)
        self.host_s.append(time.perf_counter() - started)
        return handle


def everything(built: BuiltRunner, sizes: Sequence[int]) -> dict[str, Any]:
    """Of every size, a step's time at the shortest context and the host's time hidden; and what context costs.

    The latter at `BATCH` rows, or the most that are captured and fit, over those contexts whose pages there are; None
    if that is one. Sizes whose pages there are not are named. ValueError if there are none for any.
    """
    fitting = [size for size in sizes if _fits(built, size, CONTEXTS[0])]
    if not fitting:
        raise ValueError(f"{min(sizes)} rows of {CONTEXTS[0]} tokens do not fit into {built.num_pages - 1} pages")
    assert isinstance(built.runner, ModelRunner)
    num_layers = fill_pools(built.runner)
    decode = [{"batch": size, "context": CONTEXTS[0], "ms": step_ms(built, size, CONTEXTS[0])} for size in fitting]
    batch = min(BATCH, max(fitting))
    contexts = [context for context in CONTEXTS if _fits(built, batch, context)]
    return {
        "decode": decode,
        "over_context": over_context(built, batch, contexts, num_layers) if len(contexts) > 1 else None,
        "hidden": [asdict(hidden(built, size, CONTEXTS[0])) for size in fitting],
        "without_pages": sorted(set(sizes) - set(fitting)),
    }


def _fits(built: BuiltRunner, batch: int, context: int) -> bool:
    return 1 + batch * pages_of(context) <= built.num_pages


def _spread(batch: int, past: int, num_pages: int) -> list[tuple[list[int], list[int]]]:
    """Of each row, pages of its past and of the steps that are measured, at random.

    Experts are picked by the slot of a token. So the latter are the same pages whatever the past: steps at two contexts
    pick the same experts, and differ by nothing but the context.
    """
    order = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0))).tolist()
    steps = pages_of(0)
    pasts = order[batch * steps :]
    return [(pasts[row * past : (row + 1) * past], order[row * steps : (row + 1) * steps]) for row in range(batch)]


def pages_of(context: int) -> int:
    """Of one row, with the steps that are measured; `context`: whole pages."""
    return -(-(context + 4 * STEPS) // PAGE)


def step_ms(built: BuiltRunner, batch: int, context: int) -> float:
    """The mean of some passes."""
    return statistics.fmean(_pass_ms(built, batch, context) for _ in range(PASSES))


def _pass_ms(built: BuiltRunner, batch: int, context: int) -> float:
    rows = SteadyRows(built, batch, context)
    rows.run(8)
    return 1e3 * rows.run()


def over_context(built: BuiltRunner, batch: int, contexts: Sequence[int], num_layers: int) -> dict[str, Any]:
    """Milliseconds a step at each context, the mean of some passes over all of them, and the line through them.

    Means of many steps, since each picks experts of its own: their number moves a step by 1 %.
    """
    passes = [[_pass_ms(built, batch, context) for context in contexts] for _ in range(PASSES)]
    times = [statistics.fmean(of_context) for of_context in zip(*passes, strict=True)]
    line = fit(batch, contexts, times, num_layers=num_layers)
    points = [{"context": c, "ms": round(t, 4)} for c, t in zip(contexts, times, strict=True)]
    return {"batch": batch, "points": points, **asdict(line)}


def fit(batch: int, contexts: Sequence[int], times_ms: Sequence[float], *, num_layers: int) -> Line:
    """Least squares; at least two contexts."""
    x = [context / 1024 for context in contexts]
    slope, base = statistics.linear_regression(x, times_ms)
    return Line(
        base, slope, statistics.correlation(x, times_ms) ** 2, 1e3 * slope / batch * RELEASED_LAYERS / num_layers
    )


def hidden(built: BuiltRunner, batch: int, context: int) -> Hidden:
    """See `Hidden`. The host's work is that of launches while the device is busy with the step before."""
    rows = SteadyRows(built, batch, context)
    rows.run(8)
    rows.host_s.clear()
    spans = timeline.record(rows.profiled)
    idle_us = statistics.median(timeline.gaps_after(spans, LAST_KERNEL))
    rows.host_s.clear()
    rows.run()
    host_us = 1e6 * statistics.median(rows.host_s)
    return Hidden(batch, context, host_us, idle_us, 1 - idle_us / host_us)
