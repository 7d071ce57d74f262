"""Which arithmetic the model computes in. Pure choices; the code that honours them is in the modules.

Three roundings to FP8 exist beside that of the weights, each with its own switch: the inputs of linears, the index
queries, and (a property of the pools, not of the model) cached latents and index keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numeric options of one model instance.

    dtype: of activations and of plain weights. Norm weights, router, index head weights and output head are always
        held and applied in float32.
    index_hadamard: rotate index queries and keys by the Hadamard transform. Writers and readers of one index-key cache
        must agree on it. Needs index_head_dim to be a power of two.
    index_q_fp8: round index queries to e4m3 with power-of-two scales, as FP8 scoring kernels do.
    linear_input_fp8: round the input of every linear whose checkpoint weight is block FP8, as FP8 matrix products do.
    linear_input_ue8m0: those roundings use power-of-two scales (`scale_fmt` "ue8m0").
    """

    dtype: torch.dtype
    index_hadamard: bool
    index_q_fp8: bool
    linear_input_fp8: bool = False
    linear_input_ue8m0: bool = True

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> Numerics:
        """float32: the model's exact mathematics. bfloat16: as deployed, index keys expected in FP8 pools."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the model computes in float32 or bfloat16, not {dtype}")
        deployed = dtype == torch.bfloat16
        return cls(dtype=dtype, index_hadamard=deployed, index_q_fp8=deployed)
