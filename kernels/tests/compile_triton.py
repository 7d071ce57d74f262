"""Compiles one op's Triton kernels without a GPU, for Hopper; the last line of output is JSON, an outcome by case.

python compile_triton.py OP [MODULE.NAME=NUMBER …] [arch=NUMBER]. The numbers replace those of modules of `own`; arch is
another compute capability, times ten. Calls of the backend reach Triton, which is told of a GPU that is not there and
asked to stop before the launch. A kernel that wants more shared memory than such a GPU has counts as one that fails.
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

_SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227}


class Absent:
    """As much of the driver of a GPU as compiling asks for."""

    arch = 90

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_stream(self, _: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    """Prints the outcomes."""
    gpu = Absent()
    driver.set_active(gpu)  # pyright: ignore[reportArgumentType]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel is not None
        wanted, there = kernel.metadata.shared, _SHARED_KIB[gpu.arch] << 10
        if wanted > there:
            raise MemoryError(f"{self.__name__} wants {wanted} bytes of shared memory of {there}")
        return kernel

    JITFunction.run = compile_only
    selection.load_ops()
    op = OPS[sys.argv[1]]
    for setting in sys.argv[2:]:
        place, _, number = setting.partition("=")
        if place == "arch":
            gpu.arch = int(number)
            continue
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
