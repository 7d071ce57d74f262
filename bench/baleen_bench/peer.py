"""An installed vLLM on the slice, in a process of its own: `python -m baleen_bench slice7 --peer vllm`.

The same config.json, batches, contexts and counts of tokens as ours, random weights, no prefix cache, greedy, prompts
in steps of 8192 tokens; experts are picked at random, as ours are, by vLLM's own switch for that. Prefill: tokens of
prompts over the time to all first tokens. Decode: the time for 65 tokens less that for one, over 64.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from baleen_bench import slice as slice7

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PEERS = ("vllm",)
_SETTINGS = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    # Kernels are compiled by the first run of each case, which is not measured, instead of all shapes at start.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_TOKENS = slice7.DECODE_STEPS + 1
_MOST_MEMORY = 0.92
# Seconds after which a run is not repeated.
_LONG_S = 8.0


class PeerError(Exception):
    """The peer could not be measured, or not in every case; the message is for the operator.

    rows: of the cases before it failed.
    """

    def __init__(self, message: str, rows: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


def measure(cases: tuple[tuple[int, int], ...], *, timeout_s: float) -> list[dict[str, Any]]:
    """Rows of the peer, one a case, on what this process leaves of the GPU's memory.

    PeerError if vLLM is missing, fails or takes too long.
    """
    if importlib.util.find_spec("vllm") is None:
        raise PeerError("--peer vllm: the package vllm is not installed: pip install vllm==0.26.0")
    with tempfile.TemporaryDirectory() as folder:
        slice7.write_config(Path(folder))
        output = Path(folder) / "rows.json"
        listed = ",".join(f"{batch}x{context}" for batch, context in cases)
        command = [sys.executable, "-m", "baleen_bench.peer", folder, listed, str(output)]
        try:
            code = subprocess.run(command, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = None
        rows: list[dict[str, Any]] = json.loads(output.read_text("utf-8")) if output.exists() else []
    if code is None:
        raise PeerError(f"--peer vllm: it took more than {timeout_s:.0f} s; raise --seconds", rows)
    if code != 0:
        raise PeerError(f"--peer vllm: its process ended with code {code}; its log is above", rows)
    return rows


def beside(row: dict[str, Any], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """Our row with the peer's figures of the same run and the ratios: below 1 (decode), above 1 (prefill) is ahead."""
    same = [other for other in peer if (other["batch"], other["context"]) == (row.get("batch"), row.get("context"))]
    if "error" in row or not same:
        return row
    other = same[0]
    ratios = {
        "run_peer_decode_ms": other["decode_ms"],
        "run_peer_prefill_tok_s": other["prefill_tok_s"],
        "decode_over_peer": row["decode_ms"] / other["decode_ms"],
        "prefill_over_peer": row["prefill_tok_s"] / other["prefill_tok_s"],
    }
    return row | ratios


def _run(folder: str, cases: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """A row a case, as soon as it is measured."""
    # vLLM prefers an installed DeepGEMM, which is the build that we need, to its own.
    sys.modules["deep_gemm"] = None  # pyright: ignore[reportArgumentType]
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    started_s = time.perf_counter()
    longest = max(context for _, context in cases)
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=longest + _TOKENS + 7,
        max_num_seqs=max(batch for batch, _ in cases),
        max_num_batched_tokens=slice7.CHUNK,
        enable_prefix_caching=False,
        gpu_memory_utilization=_share_of_memory(),
        compilation_config={"cudagraph_capture_sizes": sorted({batch for batch, _ in cases})},
    )

    print(f"vllm: ready after {time.perf_counter() - started_s:.1f} s", flush=True)

    def seconds(batch: int, context: int, tokens: int) -> float:
        ids = torch.randint(10, 120_000, (batch, context), generator=torch.Generator().manual_seed(1)).tolist()
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        return time.perf_counter() - started

    for batch, context in cases:
        again = 1 if seconds(batch, context, 2) > _LONG_S else 2  # the first run compiles what the shapes need
        first, all_tokens = (min(seconds(batch, context, tokens) for _ in range(again)) for tokens in (1, _TOKENS))
        step_s = (all_tokens - first) / slice7.DECODE_STEPS
        rate = batch * context / first
        yield {"batch": batch, "context": context, "decode_ms": 1e3 * step_s, "prefill_tok_s": rate}


def _share_of_memory() -> float:
    """What is free, less 3 % for what it does not account for; of the GPU's memory."""
    if not torch.cuda.is_available():
        return _MOST_MEMORY
    free, total = torch.cuda.mem_get_info()
    return min(_MOST_MEMORY, free / total - 0.03)


def main() -> None:
    """In the process of its own: FOLDER CASES OUTPUT. The file holds the cases measured so far."""
    os.environ.update(_SETTINGS)
    folder, listed, output = sys.argv[1:]
    cases = [(int(batch), int(context)) for batch, _, context in (text.partition("x") for text in listed.split(","))]
    rows: list[dict[str, Any]] = []
    for row in _run(folder, cases):
        rows.append(row)
        print(json.dumps(row), flush=True)
        so_far = Path(f"{output}.new")
        so_far.write_text(json.dumps(rows), "utf-8")
        so_far.replace(output)  # whole, if this process is stopped meanwhile


if __name__ == "__main__":
    main()
