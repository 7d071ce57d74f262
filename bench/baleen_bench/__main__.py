"""`python -m baleen_bench`: measures every kernel on this GPU and writes one JSON file; with `slice7`, a slice of the
model.

Ceilings are measured in the same run. Backends that cannot run here are listed with the reason, not measured. What is
measured has first been compared with its reference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from baleen_kernels import proof, selection
from baleen_kernels.machine import describe
from baleen_kernels.registry import OPS

from baleen_bench import kernels, timing

_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,driver_version"


def main() -> int:
    """Exit code 1 if a kernel was wrong or could not be measured."""
    if sys.argv[1:2] == ["slice7"]:
        from baleen_bench import slice_command

        return slice_command.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m baleen_bench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="unknown", help="commit of the code that is measured")
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this installation of PyTorch finds no CUDA device, and kernels are measured on one")
        return 2
    selection.load_ops()
    machine, ceilings = describe(), timing.measure_ceilings()
    print(machine.name, *(f"{name} {value:.4g}" for name, value in ceilings.as_dict().items()), sep=", ")
    rows: list[dict[str, Any]] = []
    failures = 0
    proven: dict[tuple[str, str], str] = {}
    for measurement in kernels.measurements():
        if options.op and measurement.op not in options.op:
            continue
        key = measurement.op, measurement.backend
        if key not in proven:
            proven[key] = _prove(*key, machine)
        row = {"op": measurement.op, "backend": measurement.backend, "shape": measurement.shape, "check": proven[key]}
        if proven[key] == "ok":
            try:
                row |= _measure(measurement, ceilings)
            except Exception as error:  # noqa: BLE001 - one kernel that fails must not cost the others' numbers
                row["check"] = f"{type(error).__name__}: {error}"
        needs = OPS[measurement.op].entry(measurement.backend).needs
        spared = (measurement.op, measurement.backend) in kernels.OPTIONAL and needs.missing(machine) is not None
        failures += row["check"] != "ok" and not spared
        print(_line(row), flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    document = {
        "benchmark": "kernels",
        "command": f"python -m baleen_bench {' '.join(sys.argv[1:])}",
        "commit": options.commit,
        "hardware": {"gpu": machine.name, "clocks": _clocks(), "torch": torch.__version__, **machine.versions},
        "ceilings": ceilings.as_dict(),
        "measurements": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 1 if failures else 0


def _prove(op: str, backend: str, machine: Any) -> str:
    missing = OPS[op].entry(backend).needs.missing(machine)
    if missing is not None:
        return missing
    try:
        proof.prove(OPS[op], backend, device="cuda")
    except proof.WrongResultError as error:
        return str(error)
    return "ok"


def _measure(measurement: kernels.Measurement, ceilings: timing.Ceilings) -> dict[str, Any]:
    work = measurement.make()
    us = timing.microseconds(work.call)
    peak = {"bf16": ceilings.bf16_tflops, "fp8": ceilings.fp8_tflops}[work.dtype]
    floor = max(work.num_bytes / ceilings.copy_tb_s / 1e6, work.flops / peak / 1e6)
    row: dict[str, Any] = {"us": round(us, 2), "share_of_roofline": round(floor / us, 3)}
    if work.num_bytes:
        row["tb_s"] = round(work.num_bytes / us / 1e6, 3)
    if work.flops:
        row["tflops"] = round(work.flops / us / 1e6, 1)
    if work.library is not None:
        row["library_us"] = round(timing.microseconds(work.library), 2)
        row["ratio_to_library"] = round(us / row["library_us"], 3)
    if measurement.limit_us is not None:
        row["bar"], row["met"] = f"<= {measurement.limit_us:g} us", us <= measurement.limit_us
    elif measurement.least_tb_s is not None:
        row["bar"], row["met"] = f">= {measurement.least_tb_s:g} TB/s", row["tb_s"] >= measurement.least_tb_s
    elif measurement.least_tflops is not None:
        row["bar"], row["met"] = f">= {measurement.least_tflops:g} TFLOP/s", row["tflops"] >= measurement.least_tflops
    return row


def _line(row: dict[str, Any]) -> str:
    name = f"{row['op']:14} {row['backend']:16} {row['shape']:34}"
    if row["check"] != "ok":
        return f"{name} {row['check']}"
    rates = f"{row.get('tb_s', 0):6.2f} TB/s {row.get('tflops', 0):7.1f} TFLOP/s {row['share_of_roofline']:6.1%}"
    bar = "" if "bar" not in row else f"  {'met' if row['met'] else 'MISSED'} {row['bar']}"
    ratio = f"  {row['ratio_to_library']:.2f} of the library's time" if "ratio_to_library" in row else ""
    return f"{name} {row['us']:9.1f} us {rates}{bar}{ratio}"


def _clocks() -> str:
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return f"{_CLOCKS}: {done.stdout.strip()}"


if __name__ == "__main__":
    sys.exit(main())
