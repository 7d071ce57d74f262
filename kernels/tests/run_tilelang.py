"""Runs the CUDA that TileLang makes of `mla_slots` on this host, over all its cases and sizes that nobody chose.

python run_tilelang.py CXX [PATTERN]. The last line of output is JSON, an outcome by case: "ok" or what went wrong.
PATTERN, a regular expression, takes what it matches out of the CUDA, to see that it is missed. `cuda_on_host.h` says
what is modelled. Needs TileLang and a C++ compiler, no GPU and no nvcc.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tilelang  # pyright: ignore[reportMissingImports]
from baleen_kernels import merge_parts, mla_slots, proof
from baleen_kernels.own import mla_slots_tilelang as own
from baleen_kernels.own.mla_slots import LOG2_E, outputs
from baleen_kernels.registry import Backend
from torch import Tensor

_HERE = Path(__file__).parent
_FLAGS = ("-O2", "-std=c++17", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{_HERE}")
_NUM_DRAWS = 24


def cuda_source() -> str:
    """What TileLang gives nvcc, for Hopper."""
    target = tilelang.tvm.target.Target(own.TARGET)
    with tilelang.tvm.transform.PassContext(config=own.PASSES), target:
        return tilelang.lower(own.program(), target=target).kernel_source


def compile_for_host(compiler: str, source: str, folder: Path) -> ctypes.CDLL:
    """Without CUDA's headers, and with one declaration of the kernel and of its shared memory."""
    source = re.sub(r"(?m)^#(?!pragma).*$|^extern \"C\" .*\);$|^ *extern __shared__ .*$", "", source)
    path, library = folder / "kernel.cc", folder / "kernel.so"
    path.write_text(f'#include "cuda_on_host.h"\n{source}', "utf-8")
    subprocess.run([compiler, *_FLAGS, "-o", str(library), str(path), str(_HERE / "cuda_on_host.cc")], check=True)
    return ctypes.CDLL(str(library))


class OnHost:
    """`own.mla_slots_tilelang` without a GPU. `late`, `seed`: how asynchronous work and threads are scheduled."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self.late, self.seed = library, 0, 0

    def attend(self, q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float, parts: int) -> Any:
        """As `own.attend`."""
        out, sums = outputs(q, parts)
        tensors = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (latents, out, q, slots, sums)]
        heads, work = q.shape[1], q.shape[0] * parts
        sizes = heads, parts, ctypes.c_float(softmax_scale * LOG2_E), slots.shape[1] // parts, work
        self._library.run(*tensors, *sizes, -(-heads // own.HEADS) * work, self.late, self.seed)
        return out, sums

    def __call__(self, q: Tensor, latents: Tensor, slots: Tensor, *, softmax_scale: float) -> Tensor:
        num_parts = mla_slots.parts_of(q.shape[0], q.shape[1], slots.shape[1])
        inputs = q.contiguous(), latents, slots.contiguous()
        parts, sums = self.attend(*inputs, softmax_scale=softmax_scale, parts=num_parts)
        return parts[:, 0] if num_parts == 1 else merge_parts.merge_parts(parts, sums)


def calls() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Inputs by name: every case, then random sizes around those of tiles."""
    for case in mla_slots.CASES:
        yield case.name, mla_slots.make_inputs(case)
    g = random.Random(0)
    for number in range(_NUM_DRAWS):
        tokens, heads = g.randrange(1, 4), g.choice([1, 7, 17, 63, 64, 65, 128])
        topk, padding = g.choice([1, 63, 64, 65, 127, 128, 129, 192, 300, 512]), g.choice(["some", "none", "tail"])
        case = mla_slots.Case("odd", tokens, heads, topk, False, padding, poison=padding == "some")
        yield f"draw {number}: {tokens} x {heads} x {topk}", mla_slots.make_inputs(case)


def main() -> None:
    """Prints the outcomes."""
    source = cuda_source()
    if len(sys.argv) > 2:
        source, found = re.subn(sys.argv[2], "", source)
        assert found, f"the CUDA has no {sys.argv[2]}"
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        host = OnHost(compile_for_host(sys.argv[1], source, Path(folder)))
        mla_slots.OP.backends["on host"] = Backend("on host", host)
        for seed, (name, inputs) in enumerate(calls()):
            if mla_slots.OP.entry("tilelang").rejection(inputs) is not None:
                continue
            host.late, host.seed = (3, 0, 1, 2)[seed % 4], seed
            try:
                proof.check_case(mla_slots.OP, "on host", inputs, device="cpu")
                outcomes[name] = "ok"
            except proof.WrongResultError as error:
                outcomes[name] = str(error)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
