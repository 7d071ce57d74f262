"""Flags of arithmetic, kernels and graphs: SGLang's spellings, and which role of `baleen_kernels` each of them names.

Owns names only. Whether a backend can run here is found at start, when machine and model are known; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baleen_worker.flag_values import integer

if TYPE_CHECKING:
    import argparse

ARITHMETICS = ("auto", "plain", "fused")
FLASHMLA_AUTO = "flashmla_auto"
_PREFILL, _DECODE = "mla_slots.prefill", "mla_slots.decode"
_SPARSE = ("flashmla_sparse", "flashmla_kv", FLASHMLA_AUTO, "fa3", "tilelang", "triton", "torch", "trtllm", "aiter")


@dataclass(frozen=True, slots=True)
class KernelFlag:
    """`roles`: what the flag chooses a backend for. `backends`: the names it takes besides auto."""

    names: tuple[str, ...]
    roles: tuple[str, ...]
    backends: tuple[str, ...]
    what: str

    @property
    def dest(self) -> str:
        """Where argparse keeps the value."""
        return "kernel_" + self.names[0].removeprefix("--").replace("-", "_")


KERNEL_FLAGS = (
    KernelFlag(("--dsa-prefill-backend", "--nsa-prefill-backend"), (_PREFILL,), _SPARSE, "sparse attention of prompts"),
    KernelFlag(
        ("--dsa-decode-backend", "--nsa-decode-backend"), (_DECODE,), _SPARSE, "sparse attention of decode rows"
    ),
    KernelFlag(
        ("--dsa-topk-backend", "--nsa-topk-backend"), ("topk_slots",), ("cuda", "torch"), "the selection of keys"
    ),
    KernelFlag(("--dsa-paged-mqa-logits-backend",), ("paged_scores",), ("deep_gemm", "torch"), "index scores"),
    KernelFlag(
        ("--moe-runner-backend",),
        ("contiguous_gemm",),
        ("deep_gemm", "torch"),
        "matrix products of experts that have many tokens",
    ),
    KernelFlag(
        ("--fp8-gemm-backend",),
        ("fp8_gemm",),
        ("deep_gemm", "torch"),
        "other FP8 matrix products, of more than 16 tokens",
    ),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the group."""
    add = parser.add_argument_group("arithmetic and kernels").add_argument
    add(
        "--arithmetic",
        choices=ARITHMETICS,
        default="auto",
        help="fused: FP8 matrix products and fused kernels; plain: PyTorch ops; auto: fused on GPUs if the model fits",
    )
    for flag in KERNEL_FLAGS:
        add(
            *flag.names,
            dest=flag.dest,
            choices=("auto", *flag.backends),
            default="auto",
            help=f"kernel for {flag.what} (default auto: the best that can run here)",
        )
    add("--disable-cuda-graph", action="store_true", help="launch every op of a decode step by itself")
    add(
        "--cuda-graph-max-bs",
        "--cuda-graph-max-bs-decode",
        type=integer(1, 256),
        metavar="ROWS",
        help="rows of a decode step up to which it is one CUDA graph (default: --max-running-requests, up to 256)",
    )
    add(
        "--cuda-graph-bs",
        "--cuda-graph-bs-decode",
        type=integer(1, 256),
        nargs="+",
        default=[],
        metavar="ROWS",
        help="sizes that decode steps are padded to, one graph each (default: up to --cuda-graph-max-bs)",
    )
    add(
        "--uniform-routing",
        action="store_true",
        help="pick experts at random, as balanced traffic does; for measurements with --load-format dummy",
    )


def chosen(values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Backends by role, of those flags that are not left to us."""
    return tuple(
        (role, values[flag.dest]) for flag in KERNEL_FLAGS for role in flag.roles if values[flag.dest] != "auto"
    )


def flag_of(role: str) -> str:
    """The flag that chooses a role's backend."""
    return next(flag.names[0] for flag in KERNEL_FLAGS if role in flag.roles)
