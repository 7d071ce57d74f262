"""Compiles one op's Triton kernels for Hopper, without a GPU; the last line of output is JSON, an outcome by case.

python compile_triton.py OP [MODULE.NAME=NUMBER …]. The numbers replace those of modules of `own`. Calls of the backend
reach Triton, which is told of a GPU that is not there and asked to stop before the launch.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from baleen_kernels import selection
from baleen_kernels.registry import OPS
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, _: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    """Prints the outcomes."""
    driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    selection.load_ops()
    op = OPS[sys.argv[1]]
    for setting in sys.argv[2:]:
        place, _, number = setting.partition("=")
        module, _, attribute = place.partition(".")
        setattr(importlib.import_module(f"baleen_kernels.own.{module}"), attribute, int(number))
    outcomes: dict[str, str] = {}
    for case in op.cases:
        inputs = op.make_inputs(case)
        if op.entry("triton").rejection(inputs) is None:
            try:
                op.pick("triton")(**inputs)
                outcomes[case.name] = "ok"
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is the outcome
                outcomes[case.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
