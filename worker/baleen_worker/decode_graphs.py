"""Decode steps as CUDA graphs: from the slots of the rows to their sampled tokens, launched as one piece of work.

A graph holds everything between two steps: which tokens are fed, where they sit, the plans of attention and of scoring,
all layers, the output head and the greedy choice. Only a handful of integers a row come from the host. Steps are
padded with rows of a slot that belongs to nobody, whose pages are the sink.

Two variants for each size: `short`, when no row sees more keys than the selection holds, so that nothing is scored; and
`long`. A third graph of each size, which follows one of these where a row samples at random, chooses those rows' tokens
from the same logits. Where a row changes its logits, or asks for more than its token, the rest runs behind the graph.

`capture` turns a function without arguments into a replay of it: on a CPU, where tests run, into the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baleen_worker.decode_exchange import Arrival, DecodeExchange
from baleen_worker.model.fused.experts import MOST_TILED
from baleen_worker.model.fused.step import FusedStep, SingleRows
from baleen_worker.sampler import columns_of, rules
from baleen_worker.staging import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from baleen_worker.batch import LastTokens, PageTables
    from baleen_worker.cache.storage import PagedPools
    from baleen_worker.model.fused.model import FusedModel
    from baleen_worker.sampler import SampleSpec
    from baleen_worker.step import PlannedRow

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def padded_sizes(most: int) -> list[int]:
    """Sizes that are captured: every one up to 8, then in widening steps, so that padding stays below a fifth."""
    sizes = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    sizes += range(160, MOST_TILED + 1, 32)
    most = min(most, MOST_TILED)
    return sorted({*(size for size in sizes if size < most), most})


@dataclass(frozen=True, slots=True)
class Decoded:
    """Of N rows: logits [N, V] float32, greedy tokens [N] int64, whether the logits are finite [N] bool.

    Logits and tokens are views of buffers on the device that the next step writes to. `told_*` are on the host, see
    `DecodeExchange.results_of_last`.
    """

    logits: Tensor
    token_ids: Tensor
    told_token_ids: Tensor
    told_finite: Tensor


class DecodeGraphs:
    """The graphs of one model on its pools."""

    def __init__(
        self,
        model: FusedModel,
        pools: PagedPools,
        tables: PageTables,
        last_tokens: LastTokens,
        *,
        sizes: Sequence[int],
        page_size: int,
        capture: Capture,
    ) -> None:
        """`sizes`: what steps are padded to, ascending. Captures nothing yet.

        The last slot of `tables` and of `last_tokens` belongs to no request.
        """
        self._model, self._pools, self._tables, self._last_tokens = model, pools, tables, last_tokens
        self._page_size, self._capture = page_size, capture
        self._device = device = tables.tensor.device
        self.sizes = sizes
        most, spare_slot = sizes[-1], tables.tensor.shape[0] - 1
        self._exchange = DecodeExchange(most, spare_slot, device)
        # One buffer for all sizes; a graph uses its first rows.
        self._logits = torch.zeros(most, model.config.vocab_size, device=device)
        # Tokens, and the slots of their rows.
        self._kept = torch.tensor([[0], [spare_slot]], device=device).repeat(1, most)
        self._rules = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._sampled = torch.zeros(most, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, bool], Replay] = {}
        self._sampling: dict[int, Replay] = {}

    def takes(self, rows: Sequence[PlannedRow]) -> bool:
        """Whether the step is one of these: only rows of one token, not too many, nothing to score."""
        if not rows or len(rows) > self.sizes[-1]:
            return False
        return all(row.num_tokens == 1 and row.sample and not row.score_token_ids for row in rows)

    def rehearse(self) -> None:
        """Runs the steps of all sizes once, not captured, which loads whatever any of them needs."""
        for size in self.sizes:
            with self._exchange.rehearsal():
                for short in (True, False):
                    self._step(size, short)
                self._sample(size)

    def prepare(
        self, sizes: Sequence[int] | None = None, *, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Captures these sizes, else all, the largest first, so that the smaller ones find memory that it has taken."""
        sizes = self.sizes if sizes is None else sizes
        for done, size in enumerate(sorted(sizes, reverse=True)):
            for short in (True, False):
                self._replay(size, short)
            self._replay_sampling(size)
            if on_progress is not None:
                on_progress(done + 1, len(sizes))

    def decode(self, rows: Sequence[PlannedRow]) -> Decoded:
        """Launches the step. The greedy tokens are already remembered for the rows' slots."""
        num_rows = len(rows)
        size = self._size_for(num_rows)
        short = max(row.start for row in rows) < self._model.config.index_topk
        replay = self._replay(size, short)  # first: a capture fills the exchange itself
        self._exchange.give(rows, size)
        try:
            replay()
        except Exception:
            self._exchange.agree()  # else the next step would find this one's rows
            raise
        told = self._exchange.results_of_last(num_rows)
        return Decoded(self._logits[:num_rows], self._kept[0, :num_rows], *told)

    def until(self, arrival: Arrival) -> None:
        """What the step launched last told the host is not needed any more when these results have come."""
        self._exchange.until(arrival)

    def sample(self, specs: Sequence[SampleSpec]) -> Tensor:
        """Tokens [N] of the rows of the step just launched, by their specs; they are remembered for the rows' slots.

        A view of a buffer that the next step writes to.
        """
        num_rows = len(specs)
        size = self._size_for(num_rows)
        table = np.zeros((5, size), dtype=np.int64)  # a temperature of zero for rows of nobody
        table[:, :num_rows] = rules(specs)
        replay = self._replay_sampling(size)
        self._rules[:, :size].copy_(to_device(table, self._device), non_blocking=True)
        replay()
        return self._sampled[:num_rows]

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def _replay_sampling(self, size: int) -> Replay:
        if size not in self._sampling:
            self._sampling[size] = self._capture(lambda: self._sample(size))
        return self._sampling[size]

    def _sample(self, size: int) -> None:
        temperature, top_p, min_p, top_k, keys = columns_of(self._rules[:, :size])
        logits, (greedy, slots) = self._logits[:size], self._kept[:, :size]
        token_ids = self._model.ops.sample(logits, greedy, temperature, top_k, top_p, min_p, keys)
        self._sampled[:size] = token_ids
        self._last_tokens.tensor[slots] = token_ids

    def _replay(self, size: int, short: bool) -> Replay:
        key = size, short
        if key not in self._replays:
            # Rows of the spare slot, so that a capture that runs the step writes to the sink alone.
            with self._exchange.rehearsal():
                self._replays[key] = self._capture(lambda: self._step(size, short))
        return self._replays[key]

    def _step(self, size: int, short: bool) -> None:
        last_tokens, ops, exchange = self._last_tokens.tensor, self._model.ops, self._exchange
        slots, positions, input_ids, kv_slots, lengths, tables = ops.decode_inputs(
            exchange.given,
            exchange.turn,
            last_tokens,
            self._tables.tensor,
            num_rows=size,
            page_size=self._page_size,
        )
        max_length = tables.shape[1] * self._page_size
        step = FusedStep(
            positions=positions,
            kv_slots=kv_slots,
            single=SingleRows(lengths, tables, short, max_length),
        )
        if not short:
            assert step.single is not None
            step.schedule = self._model.schedule_of(step.single.lengths)
        hidden = self._model.run(input_ids, step, self._pools)
        logits = self._model.compute_logits(hidden, self._logits[:size])
        token_ids, finite = ops.greedy_choice(logits)
        ops.decode_results(token_ids, finite, slots, last_tokens, self._kept, exchange.results, exchange.turn)


def run_directly(step: Callable[[], None]) -> Replay:
    """No graph at all."""
    return step


class GraphCapture:
    """Captures on a stream of its own; all graphs share one pool of memory, for they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Replay:
        """Runs the step twice, which compiles and loads what it needs, then records it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step()
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay
