"""A slice of DeepSeek-V3.2 at full width on one GPU, driven as an engine would: `python -m baleen_bench slice7`.

`v32-slice7`, or one rank of a deployment without its communication (`SLICES`). The slice: 7 layers, one dense and six
with all 256 experts, all 128 heads, random block-FP8 weights, experts picked evenly at random (random weights alone
would send all tokens to a few experts). Steps are planned here in the plainest way, so that what is measured is the
runner: prompts of batch x context tokens in pieces of at most 8192 tokens a step, then 64 decode steps after the first
token, each launched before the one before it is collected.

A case's prefill rate is prompt tokens over the time until all first tokens are on the host; its decode time is that of
64 steps over 64. The best of three runs counts, the first of which compiles; long prefills run once.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import Admission, PlannedRow, StepPlan

from baleen_bench import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baleen_worker.step import BuiltRunner, Runner

PAGE = 64
CHUNK = 8192
DECODE_STEPS = 64
# Seconds after which a run is not repeated.
_LONG_S = 8.0
# What a decode step ends with: its tokens are kept.
_LAST_KERNEL = "_keep"
CASES = ((1, 4096), (16, 4096), (64, 4096), (128, 4096), (1, 32_768), (16, 32_768))

# config.json of the release; the slice replaces the number of layers.
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SLICE7: dict[str, Any] = {"num_hidden_layers": 7, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
# What changes in config.json for each slice. A rank of DP8/EP8 has 64 requests of its own and, of the 512 x 8 picks of
# all ranks, those of its 32 experts, which are as many as if its own 64 tokens picked 8 of these 32. A rank of TP8 has
# an eighth of the heads, of every feed-forward's width and of the vocabulary. Neither communicates.
SLICES: dict[str, dict[str, Any]] = {
    "v32-slice7": SLICE7,
    "v32-dp8ep8-rank": {"num_nextn_predict_layers": 0, "n_routed_experts": 32, "n_group": 1, "topk_group": 1},
    "v32-tp8-rank": {
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2304,
        "moe_intermediate_size": 256,
        "vocab_size": 16_160,
    },
}
# Of a rank's own requests.
RANK_CASES = ((1, 4096), (16, 4096), (64, 4096))


@dataclass(frozen=True, slots=True)
class Measured:
    """One case. Rates in tokens a second, times in milliseconds."""

    batch: int
    context: int
    prefill_tok_s: float
    first_token_ms: float
    decode_ms: float
    decode_tok_s: float


def write_config(folder: Path, changes: dict[str, Any] = SLICE7) -> None:
    """The slice's config.json, which is all that a model with random weights needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(RELEASED | changes), "utf-8")


def build(*, sizes: Sequence[int], changes: dict[str, Any] = SLICE7, **options: Any) -> BuiltRunner:
    """The slice, ready to run batches of those sizes. `options`: fields of `WorkerConfig`."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "uniform_routing": True,
        "chunked_prefill_size": CHUNK,
        "max_running_requests": max(sizes),
        "cuda_graph_bs": tuple(sizes),
        "context_length": 40_000,
        "mem_fraction_static": 0.92,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), changes)
        return build_runner(WorkerConfig(model_dir=Path(folder), **(settings | options)))


class Requests:
    """A batch of equal prompts in progress, each in its own slot and on its own pages."""

    def __init__(self, runner: Runner, batch: int, context: int, num_pages: int) -> None:
        """ValueError if the pages do not hold the batch."""
        self._runner, self._batch, self._context = runner, batch, context
        per_request = -(-(context + DECODE_STEPS + 1) // PAGE)
        if 1 + batch * per_request > num_pages:
            raise ValueError(
                f"{batch} requests of {context} tokens need {batch * per_request} pages, of {num_pages - 1}"
            )
        # Pages of a busy server lie anywhere.
        order = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0))).tolist()
        self._pages = [order[i * per_request : (i + 1) * per_request] for i in range(batch)]
        ids = torch.randint(10, 16_000, (batch, context), generator=torch.Generator().manual_seed(1))
        self._ids = ids.tolist()
        self._step = 0

    def prefill(self) -> None:
        """Computes all prompts and one token of each."""
        admissions = [
            Admission(slot, SamplingParams(max_tokens=DECODE_STEPS + 1, seed=0, temperature=0.0))
            for slot in range(self._batch)
        ]
        handles = []
        for rows in self._pieces():
            handles.append(self._runner.launch(StepPlan(self._step, admissions, rows)))
            admissions = []
            self._step += 1
        for handle in handles:
            self._check(handle.collect().errors)

    def _pieces(self) -> Iterator[list[PlannedRow]]:
        rows: list[PlannedRow] = []
        budget = CHUNK
        for slot in range(self._batch):
            done = 0
            while done < self._context:
                size = min(budget, self._context - done)
                rows.append(self._row(slot, done, self._ids[slot][done : done + size], self._context))
                done, budget = done + size, budget - size
                if budget == 0:
                    yield rows
                    rows, budget = [], CHUNK
        if rows:
            yield rows

    def decode(self) -> None:
        """64 steps, each launched before the one before it is collected."""
        before = None
        for number in range(DECODE_STEPS):
            start = self._context + number
            rows = [self._row(slot, start, (), start + 1, output_index=number + 1) for slot in range(self._batch)]
            handle = self._runner.launch(StepPlan(self._step, (), rows))
            self._step += 1
            if before is not None:
                self._check(before.collect().errors)
            before = handle
        assert before is not None
        self._check(before.collect().errors)

    def _row(self, slot: int, start: int, token_ids: Sequence[int], last: int, *, output_index: int = 0) -> PlannedRow:
        end = start + (len(token_ids) or 1)
        first, after = -(-start // PAGE), -(-end // PAGE)
        return PlannedRow(
            slot=slot,
            start=start,
            token_ids=token_ids,
            first_new_page=first,
            new_pages=self._pages[slot][first:after],
            sample=end == last,
            output_index=output_index,
            from_device=not token_ids,
        )

    @staticmethod
    def _check(errors: dict[int, str]) -> None:
        if errors:
            raise RuntimeError(f"{len(errors)} rows failed: {next(iter(errors.values()))}")


def measure(built: BuiltRunner, batch: int, context: int) -> Measured:
    """One case: the best of a few runs, after one that compiles what the shapes need."""
    requests = Requests(built.runner, batch, context, built.num_pages)
    prefill_s = _best_seconds(requests.prefill)
    step_s = _best_seconds(requests.decode) / DECODE_STEPS
    rate = batch * context / prefill_s
    return Measured(batch, context, rate, 1e3 * prefill_s, 1e3 * step_s, batch / step_s)


def _best_seconds(call: Callable[[], None]) -> float:
    """Of three runs; long ones are as steady as short ones, and one is enough."""
    taken = [_seconds(call)]
    while len(taken) < 3 and sum(taken) < _LONG_S:
        taken.append(_seconds(call))
    return min(taken)


def _seconds(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def profile(built: BuiltRunner, batch: int, context: int) -> dict[str, str]:
    """The kernels of a prefill and of 64 decode steps, as tables, and those of the last step one by one."""
    requests = Requests(built.runner, batch, context, built.num_pages)
    tables: dict[str, str] = {}
    for name, call in (("prefill", requests.prefill), ("decode", requests.decode)):
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        averages = seen.key_averages()
        tables[name] = averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
    step = timeline.last_step(timeline.record(requests.decode), ends_with=_LAST_KERNEL)
    return tables | {"step": "\n".join(timeline.table(step)) + "\n"}


def run_cases(built: BuiltRunner, cases: Sequence[tuple[int, int]], *, deadline_s: float) -> Iterator[dict[str, Any]]:
    """Every case as a row of the result; one that fails says why and costs the others nothing."""
    for batch, context in cases:
        if time.monotonic() > deadline_s:
            yield {"batch": batch, "context": context, "error": "no time was left"}
            continue
        try:
            yield asdict(measure(built, batch, context))
        except Exception as error:  # noqa: BLE001 - whatever broke one case is that case's result
            yield {"batch": batch, "context": context, "error": f"{type(error).__name__}: {error}"[:400]}
