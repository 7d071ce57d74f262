"""Which arithmetic a model is computed in, and with which kernels. Decided once, at start, and written down.

Plain: weights dequantised if they were FP8, PyTorch ops one by one; every model, every dtype, also on CPUs. Fused: FP8
matrix products and fused ops (`model.fused`), each by the backend that `baleen_kernels.selection` chooses for the
machine and the model's shapes, and proves with a call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from baleen_kernels import machine, selection

from baleen_worker.cache.storage import FP8
from baleen_worker.kernel_flags import FLASHMLA_AUTO, flag_of
from baleen_worker.model.fused import model as fused
from baleen_worker.model.fused.ops import ROLES
from baleen_worker.model.fused.samples import samples

if TYPE_CHECKING:
    from baleen_kernels.selection import Selection

    from baleen_worker.config import WorkerConfig
    from baleen_worker.model_config import ModelConfig

# What a decode step runs. A graph can hold it if none of it is PyTorch code that looks at what it computed.
_DECODE_ROLES = (
    selection.DECODE,
    "combine_norm",
    "decode_inputs",
    "decode_results",
    "fp8_gemm",
    "indexer_prep",
    "mla_prep",
    "moe_route",
    "moe_tiles",
    "paged_scores",
    "thin_gemm",
    "tile_hidden",
    "tile_out",
    "topk_slots",
    "value_quant",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """`selection` is None for the plain arithmetic; `why_plain` then says why it is not fused."""

    selection: Selection | None
    why_plain: str = ""

    @property
    def graph_obstacle(self) -> str | None:
        """Why a CUDA graph cannot hold a decode step; None if it can."""
        if self.selection is None:
            return "the plain arithmetic looks at its results on the host"
        slow = next((role for role in _DECODE_ROLES if self.selection.backend(role) == "torch"), None)
        return None if slow is None else f"{slow} runs on PyTorch ops"

    def features(self) -> tuple[str, ...]:
        """As GetInfo lists them."""
        if self.selection is None:
            return ("arithmetic:plain",)
        chosen = (f for f in self.selection.features() if f.partition(":")[2].partition("=")[0] in ROLES)
        return ("arithmetic:fused", *chosen)


def choose_kernels(
    config: WorkerConfig, model_config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> ModelKernels:
    """Decides, proves and logs. ValueError, with a sentence for the operator, for what cannot be honoured."""
    kernels = _decide(config, model_config, device, dtype)
    if kernels.selection is None:
        logger.info("plain arithmetic on PyTorch ops, since %s", kernels.why_plain)
        return kernels
    selection.prove(kernels.selection, device=device.type, roles=ROLES)
    logger.info("fused arithmetic: %s", ", ".join(kernels.features()[1:]))
    return kernels


def resolve_kernels(config: WorkerConfig, model_config: ModelConfig) -> ModelKernels:
    """The same decision for this machine, without proof."""
    device = device_of(config.device)
    return _decide(config, model_config, device, dtype_of(config.dtype, device))


def device_of(name: str) -> torch.device:
    """The device behind --device. ValueError if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this installation of PyTorch finds no CUDA device; use --device cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype behind --dtype."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _decide(config: WorkerConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelKernels:
    why_plain = _why_plain(config, model_config, device, dtype)
    wanted = dict(config.kernel_backends)
    if why_plain is not None:
        unusable = next(((role, name) for role, name in wanted.items() if name != "torch"), None)
        if unusable is not None:
            flag = f"{flag_of(unusable[0])} {unusable[1]}"
            raise ValueError(f"{flag} cannot be honoured: the model is computed by PyTorch, since {why_plain}")
        if config.uniform_routing:
            raise ValueError(f"--uniform-routing needs the fused arithmetic, which is not used, since {why_plain}")
        return ModelKernels(None, why_plain)
    packed = config.kv_cache_dtype == FP8
    for role in (selection.PREFILL, selection.DECODE):
        if wanted.get(role) == FLASHMLA_AUTO:
            wanted[role] = "flashmla_kv" if packed else "flashmla_sparse"
    chosen = selection.select(
        machine.describe("cpu" if device.type == "cpu" else "auto"),
        wanted=wanted,
        kv_cache_dtype=FP8 if packed else "bfloat16",
        samples=samples(model_config, packed=packed, dtype=dtype),
    )
    return ModelKernels(chosen)


def _why_plain(config: WorkerConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason, completing "since …"; None for the fused arithmetic."""
    if config.arithmetic == "plain":
        return "--arithmetic plain asks for it"
    asked_for = config.arithmetic == "fused"
    if device.type == "cpu" and not asked_for:
        return "the device is a CPU"
    reason = fused.why_not(model_config)
    if reason is None and dtype != torch.bfloat16:
        reason = f"--dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if reason is None and config.kv_cache_dtype == "float32":
        reason = "--kv-cache-dtype is float32"
    if reason is not None and asked_for:
        raise ValueError(f"--arithmetic fused cannot be honoured: {reason}")
    return reason
