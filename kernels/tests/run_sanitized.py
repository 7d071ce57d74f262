"""Calls our own CUDA kernels on their cases and on odd sizes, for a tool that watches every access; see test_sanitizer.

python run_sanitized.py. Every tensor has memory of its own, so that what lies behind it is nobody's.
"""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from baleen_kernels import machine, proof, selection, wide_gemm
from baleen_kernels.registry import OPS, Op
from odd_sizes import DRAWS, draw

NUM_DRAWS = 12


def main() -> None:
    """Prints how many calls came out like the reference; raises at one that did not."""
    selection.load_ops()
    wide_gemm.wide_gemm = _product_on_the_host
    here = machine.describe()
    own = [op for op in OPS.values() if "cuda" in op.backends and op.entry("cuda").needs.missing(here) is None]
    for op in own:
        print(f"{op.name}: {call_all(op)} calls are right", flush=True)
    print(f"all calls of {len(own)} ops are right")


def call_all(op: Op[Any]) -> int:
    """Calls the op on everything that its CUDA takes; returns how often. Only copies run beside it on the device."""
    inputs = [op.make_inputs(case) for case in op.cases]
    inputs += [draw(op.name, seed) for seed in range(NUM_DRAWS) if op.name in DRAWS]
    taken = 0
    for arguments in inputs:
        if op.entry("cuda").rejection(arguments) is None and any(map(_size, arguments.values())):
            expected = proof.results(op, op.reference, copy.deepcopy(dict(arguments)))
            found = proof.results(op, op.pick("cuda"), proof.move(arguments, "cuda"))
            torch.cuda.synchronize()
            narrow = any(
                isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in arguments.values()
            )
            for got, want in zip(found, expected, strict=True):
                problem = proof.difference(op, got.cpu(), want, narrow=narrow)
                assert problem is None, f"{op.name}: {problem}"
            taken += 1
    return taken


def _product_on_the_host(x: torch.Tensor, weight: torch.Tensor, *, backend: str = "torch") -> torch.Tensor:
    """In place of cuBLAS, whose kernels racecheck complains of, and whose stores initcheck takes for none."""
    return (x.cpu().float() @ weight.cpu().float().T).to(x.device)


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


if __name__ == "__main__":
    main()
