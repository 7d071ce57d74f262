"""`python -m baleen_bench slice7`: a slice of the model on this GPU, in every variant asked for, as one JSON file."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from baleen_kernels.machine import describe

from baleen_bench import peer, steady
from baleen_bench import slice as slice7

# What vLLM 0.26.0 took on an H200 for the same slice with the same routing (bfloat16 keys): ms a step, tokens a second.
PEER_DECODE_MS = {(1, 4096): 2.42, (16, 4096): 8.49, (64, 4096): 15.5, (128, 4096): 19.6, (16, 32_768): 8.31}
PEER_PREFILL_TOK_S = {4096: 51_600.0, 32_768: 42_300.0}
BAR_DECODE_MS = {(1, 4096): 1.95, (16, 4096): 7.9, (64, 4096): 15.2, (128, 4096): 19.0, (16, 32_768): 7.9}
BAR_PREFILL_TOK_S = {4096: 60_000.0, 32_768: 50_000.0}
BAR_RANK_MS = {("v32-dp8ep8-rank", 64, 4096): 36.0}

_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,driver_version"


def main(arguments: list[str]) -> int:
    """Exit code 1 if a variant or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m baleen_bench slice7", description=slice7.__doc__)
    parser.add_argument("--slice", choices=slice7.SLICES, default="v32-slice7", help="which part of the model")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--config-only", type=Path, metavar="FOLDER", help="write the slice's config.json and end")
    parser.add_argument("--commit", default="unknown", help="commit of the code that is measured")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one; may be repeated")
    parser.add_argument("--cases", help="BATCHxCONTEXT, with commas between them")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case is begun after so many")
    parser.add_argument("--profile", help="BATCHxCONTEXT: also list the kernels of that case, beside the JSON file")
    parser.add_argument(
        "--steady", action="store_true", help="only: cost of context, and host time hidden, in a file of its own"
    )
    parser.add_argument("--peer", choices=peer.PEERS, help="also run this installed engine, after ours, for the ratios")
    options = parser.parse_args(arguments)
    if options.config_only is not None:
        slice7.write_config(options.config_only, slice7.SLICES[options.slice])
        return 0
    if options.out is None:
        parser.error("--out FILE is needed")
    if not torch.cuda.is_available():
        print("error: this installation of PyTorch finds no CUDA device, and the slice is measured on one")
        return 2
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", stream=sys.stderr)
    cases = slice7.CASES if options.slice == "v32-slice7" else slice7.RANK_CASES
    if options.cases is not None:
        cases = tuple(_case(text) for text in options.cases.split(","))
    deadline_s = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    if options.peer is not None and options.slice != "v32-slice7":
        parser.error("--peer runs the whole experts of v32-slice7, not one rank's share of them")
    for variant in options.variant or list(VARIANTS):
        for row in _variant(variant, cases, deadline_s, options):
            rows.append(row)
            print(json.dumps(row), flush=True)
            _write(options, rows)
    if options.peer is not None and not _set_peer_beside(rows, cases, options):
        return 2
    return 1 if any("error" in row for row in rows) else 0


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "bf16-eager": {"disable_cuda_graph": True},
}


def _set_peer_beside(
    rows: list[dict[str, Any]], cases: tuple[tuple[int, int], ...], options: argparse.Namespace
) -> bool:
    """Measures the peer, which prints its own rows, and writes ours beside them. False, with a line, if it failed."""
    problem = None
    try:
        peers = peer.measure(cases, timeout_s=options.seconds)
    except peer.PeerError as error:
        problem, peers = error, error.rows
        print(f"error: {error}")
    _write(options, [peer.beside(row, peers) for row in rows])
    return problem is None


def _variant(
    name: str, cases: tuple[tuple[int, int], ...], deadline_s: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one variant; the failure of a whole variant is a row too."""
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    if started > deadline_s:
        return [{"variant": name, "error": "no time was left"}]
    built = None
    try:
        sizes = sorted({batch for batch, _ in cases} | ({steady.BATCH} if options.steady else set()))
        context = {"context_length": steady.CONTEXTS[-1] + slice7.CHUNK} if options.steady else {}
        built = slice7.build(sizes=sizes, changes=slice7.SLICES[options.slice], **context, **VARIANTS[name])
        start = {"variant": name, "start_s": round(time.monotonic() - started, 1), "features": list(built.features)}
        print(json.dumps(start), flush=True)
        if options.steady:
            found = steady.everything(built, sizes)
            for row in found["decode"]:
                limit = BAR_RANK_MS.get((options.slice, row["batch"], row["context"]))
                row.update({} if limit is None else {"bar_ms": limit, "met": row["ms"] <= limit})
            print(json.dumps(found), flush=True)
            document = {**_header(options), "variant": name, **found}
            options.out.with_suffix(f".{name}.steady.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
            return rows
        for row in slice7.run_cases(built, cases, deadline_s=deadline_s):
            rows.append({"variant": name, **row, **_beside(options.slice, row)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.profile is not None and time.monotonic() < deadline_s:
            for what, table in slice7.profile(built, *_case(options.profile)).items():
                options.out.with_suffix(f".{name}.{what}.txt").write_text(table, "utf-8")
    except Exception as error:
        logging.getLogger(__name__).exception("variant %s", name)
        rows.append({"variant": name, "error": f"{type(error).__name__}: {error}"[:600]})
    del built
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _beside(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """The peer's figure and the bar for a case of a slice that has them."""
    if "error" in row:
        return {}
    case = row["batch"], row["context"]
    if name != "v32-slice7":
        limit = BAR_RANK_MS.get((name, *case))
        return {} if limit is None else {"bar_decode_ms": limit, "decode_met": row["decode_ms"] <= limit}
    beside: dict[str, Any] = {}
    if case in BAR_DECODE_MS:
        beside |= {"bar_decode_ms": BAR_DECODE_MS[case], "decode_met": row["decode_ms"] <= BAR_DECODE_MS[case]}
        beside["peer_decode_ms"] = PEER_DECODE_MS[case]
    if row["context"] in BAR_PREFILL_TOK_S:
        least = BAR_PREFILL_TOK_S[row["context"]]
        beside |= {"bar_prefill_tok_s": least, "prefill_met": row["prefill_tok_s"] >= least}
        beside["peer_prefill_tok_s"] = PEER_PREFILL_TOK_S[row["context"]]
    return beside


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    document = {**_header(options), "measurements": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _header(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, of what and on what."""
    machine = describe()
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    clocks = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    hardware = {"gpu": machine.name, "clocks": f"{_CLOCKS}: {clocks}", "torch": torch.__version__, **machine.versions}
    return {
        "benchmark": options.slice,
        "command": f"python -m baleen_bench {' '.join(sys.argv[1:])}",
        "commit": options.commit,
        "hardware": hardware,
        "slice": slice7.SLICES[options.slice],
        "routing": "uniform, at random",
    }


def _case(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return int(batch), int(context)
