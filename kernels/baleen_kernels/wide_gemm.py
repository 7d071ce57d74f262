"""Matrix product whose result stays in float32: router, head weights of the indexer, output head.

  out[t, n] = x[t] . weight[n], sums in float32 and not rounded afterwards

x [T, K] and weight [N, K], both bfloat16 or both float32 -> [T, N] float32; with `out`, of that shape, written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.machine import NVIDIA, Needs
from baleen_kernels.registry import Op


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    width: int
    out_features: int
    dtype: torch.dtype = torch.bfloat16
    into: bool = False


CASES = (
    Case("router", 5, 512, 256),
    Case("one_token", 1, 256, 64),
    Case("head", 3, 384, 2048),
    Case("float32", 4, 96, 40, dtype=torch.float32),
    Case("into_a_buffer", 3, 256, 512, into=True),
    Case("no_tokens", 0, 64, 32),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random matrices."""
    g = torch.Generator().manual_seed(case.num_tokens)
    inputs = {
        "x": torch.randn(case.num_tokens, case.width, generator=g).to(case.dtype),
        "weight": (torch.randn(case.out_features, case.width, generator=g) * case.width**-0.5).to(case.dtype),
    }
    return inputs | ({"out": torch.full((case.num_tokens, case.out_features), torch.nan)} if case.into else {})


def reference(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The contract in float64."""
    result = (x.double() @ weight.double().T).float()
    return result if out is None else out.copy_(result)


OP = Op("wide_gemm", reference, CASES, make_inputs, bf16_error=2e-3)


@OP.backend("torch")
def _torch(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    result = torch.nn.functional.linear(x.float(), weight.float())
    return result if out is None else out.copy_(result)


def _rejects_cublas(x: Tensor, weight: Tensor, **_: Any) -> str | None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"it multiplies bfloat16 matrices, not {x.dtype} and {weight.dtype}"
    return None if x.shape[0] else "it takes at least one token"


@OP.backend("cublas", needs=Needs(archs=NVIDIA, arch_note="an NVIDIA GPU"), rejects=_rejects_cublas)
def _cublas(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return torch.mm(x, weight.T, out_dtype=torch.float32, out=out)


def wide_gemm(x: Tensor, weight: Tensor, out: Tensor | None = None, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(x, weight, out)
