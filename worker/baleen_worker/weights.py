"""Fills a model with the tensors of a checkpoint.

Owns which stored tensor goes where, in which type, and what is left out on purpose: multi-token-prediction layers,
rotary tables, and the head where it is tied to the embedding. Everything that does not fit is found from the headers
and reported together, before any data is read. Tensors are copied one at a time, so that memory stays near the size
of the model.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from baleen_worker.checkpoint import Checkpoint, listed, open_checkpoint, open_file
from baleen_worker.json_keys import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from baleen_worker.model_config import ModelConfig

_FLOAT_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))
_SCALE_DTYPES = _FLOAT_DTYPES | {"F8_E8M0"}
_FP8 = "F8_E4M3"
# Of one buffer of random numbers: 64 MiB of them.
_DUMMY_NUMBERS = 1 << 24
_SCALE_SUFFIX = "_scale_inv"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Bytes of float32 that one step of dequantising holds beside the model.
_SLAB_BYTES = 1 << 26
# Bytes that are read before a file is opened anew.
_MAX_MAPPED_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did. `num_bytes_read` counts stored bytes, `weights_bytes` what the model holds now."""

    num_tensors: int
    num_bytes_read: int
    num_mtp_tensors_skipped: int
    weights_bytes: int


def load_weights(
    model: nn.Module,
    model_dir: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Gives every parameter of the model (made on the meta device) its tensor, on `device`, in the parameter's dtype.

    A matrix stored in block FP8 is dequantised, unless the parameter is FP8 itself and has its scales beside it.
    `on_progress` gets (bytes done, bytes in all). Raises CheckpointError.
    """
    checkpoint = open_checkpoint(model_dir)
    plan = _plan(dict(model.named_parameters()), checkpoint, config)
    total = sum(source.num_bytes for source in plan.sources.values())
    done = 0
    with tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:
        for name, tensor in _read(plan, device):
            _assign(model, name, tensor)
            size = plan.sources[name].num_bytes
            done += size
            bar.update(size)
            if on_progress is not None:
                on_progress(done, total)
    return LoadReport(
        num_tensors=len(plan.sources),
        num_bytes_read=total,
        num_mtp_tensors_skipped=plan.num_mtp,
        weights_bytes=_weights_bytes(model),
    )


def fill_with_dummy_weights(model: nn.Module, *, device: torch.device, seed: int) -> LoadReport:
    """Random weights that keep activations at their size. Each tensor depends on the seed and its name alone.

    All pass through one buffer: temporaries of every size would leave blocks behind in which weights that stay lie
    beside weights that are given back when layers are fused, and whose rest nothing large fits into.
    """
    noise = torch.empty(_DUMMY_NUMBERS, device=device)
    for name, parameter in list(model.named_parameters()):
        if parameter.dtype == torch.float8_e4m3fn:
            continue  # filled with its scales
        # One checksum of both, because a CPU's generator takes 32 bits.
        g = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if name.endswith(_SCALE_SUFFIX):
            # A tile of standard normal values, scaled to the matrix's own deviation.
            weight_name = name.removesuffix(_SCALE_SUFFIX)
            values = torch.empty(model.get_parameter(weight_name).shape, dtype=torch.float8_e4m3fn, device=device)
            _fill_with_noise(values, noise, g)
            _assign(model, weight_name, values)
            tensor.fill_(values.shape[1] ** -0.5)
        elif parameter.ndim == 1:
            # Gains are near one, offsets near zero.
            _fill_with_noise(tensor, noise, g, scale=0.1, offset=1.0 if name.endswith(".weight") else 0.0)
        else:
            is_embedding = name.endswith("embed_tokens.weight")
            _fill_with_noise(tensor, noise, g, scale=1.0 if is_embedding else parameter.shape[1] ** -0.5)
        _assign(model, name, tensor)
    return LoadReport(len(list(model.parameters())), 0, 0, _weights_bytes(model))


def _fill_with_noise(
    tensor: Tensor, buffer: Tensor, g: torch.Generator, *, scale: float = 1.0, offset: float = 0.0
) -> None:
    """Normal values within four deviations, times `scale`, plus `offset`, as many at a time as `buffer` holds."""
    for part in tensor.flatten().split(buffer.numel()):
        noise = buffer[: part.numel()].normal_(generator=g).clamp_(-4, 4)
        part.copy_(noise.mul_(scale).add_(offset))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter comes from. `scale` names the scales of a block-FP8 matrix that is to be dequantised."""

    file: Path
    dtype: torch.dtype
    num_bytes: int
    scale: str | None = None
    scale_file: Path | None = None


@dataclass(slots=True)
class _Plan:
    """`sources` in reading order; the rest is what does not fit."""

    tile: tuple[int, int] | None
    sources: dict[str, _Source] = field(default_factory=dict)
    num_mtp: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def raise_if_bad(self, model_dir: Path) -> None:
        parts = [
            f"{len(names):,} {what} ({listed(names)})"
            for what, names in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("of the wrong shape or type", self.misfits),
            )
            if names
        ]
        if parts:
            raise CheckpointError(
                f"the tensors in {model_dir} are not those that its config.json describes: {'; '.join(parts)}; "
                "use weights and config.json of one checkpoint"
            )


def _plan(parameters: Mapping[str, nn.Parameter], checkpoint: Checkpoint, config: ModelConfig) -> _Plan:
    quantization = config.quantization_config
    plan = _Plan(None if quantization is None else quantization.weight_block_size)
    stored = checkpoint.tensors
    used: set[str] = set()
    fitting: dict[str, _Source] = {}
    for name, parameter in parameters.items():
        if name not in stored:
            plan.missing.append(name)
            continue
        used.add(name)
        source = _source(name, parameter, checkpoint, plan)
        if source is not None:
            fitting[name] = source
            if source.scale is not None:
                used.add(source.scale)
    for name in stored:
        if name in fitting:
            plan.sources[name] = fitting[name]
        elif name in used:
            continue
        elif _is_mtp(name, config):
            plan.num_mtp += 1
        elif _is_unused_indexer(name, config):
            continue
        elif not _is_redundant(name, used - fitting.keys(), config):
            plan.unexpected.append(name)
    plan.raise_if_bad(checkpoint.model_dir)
    return plan


def _source(name: str, parameter: nn.Parameter, checkpoint: Checkpoint, plan: _Plan) -> _Source | None:
    """How to fill the parameter; None, with the reason noted in the plan, where the stored tensor does not fit."""
    header = checkpoint.tensors[name]
    keeps_fp8 = parameter.dtype == torch.float8_e4m3fn
    if header.shape != tuple(parameter.shape):
        plan.misfits.append(f"{name}: stored {list(header.shape)}, described {list(parameter.shape)}")
        return None
    if keeps_fp8 and header.dtype != _FP8:
        plan.misfits.append(f"{name}: stored as {header.dtype}, to be kept as {_FP8}")
        return None
    source = _Source(header.file, parameter.dtype, header.num_bytes)
    accepted = _SCALE_DTYPES if name.endswith(_SCALE_SUFFIX) else _FLOAT_DTYPES
    if keeps_fp8 or header.dtype in accepted:
        return source
    if header.dtype != _FP8 or len(header.shape) != 2:
        plan.misfits.append(f"{name}: stored as {header.dtype}, which is no type for weights here")
        return None
    return _dequantised(name, source, checkpoint, plan)


def _dequantised(name: str, source: _Source, checkpoint: Checkpoint, plan: _Plan) -> _Source | None:
    scale = name + _SCALE_SUFFIX
    if plan.tile is None:
        plan.misfits.append(f"{name}: stored as {_FP8}, but config.json has no quantization_config")
        return None
    if scale not in checkpoint.tensors:
        plan.missing.append(scale)
        return None
    header, shape = checkpoint.tensors[scale], checkpoint.tensors[name].shape
    grid = tuple(-(-size // tile) for size, tile in zip(shape, plan.tile, strict=True))
    if header.shape != grid:
        plan.misfits.append(f"{scale}: stored {list(header.shape)}, described {list(grid)}")
        return None
    if header.dtype not in _SCALE_DTYPES:
        plan.misfits.append(f"{scale}: stored as {header.dtype}, which is no type for scales here")
        return None
    return _Source(source.file, source.dtype, source.num_bytes + header.num_bytes, scale, header.file)


def _is_mtp(name: str, config: ModelConfig) -> bool:
    match = _LAYER.match(name)
    first = config.num_hidden_layers
    return match is not None and first <= int(match[1]) < first + config.num_nextn_predict_layers


def _is_unused_indexer(name: str, config: ModelConfig) -> bool:
    """A checkpoint trained with an indexer in every layer may be served with fewer (IndexCache)."""
    match = _LAYER.match(name)
    if match is None or ".self_attn.indexer." not in name or not config.has_indexer:
        return False
    return not config.index_layers[int(match[1])]


def _is_redundant(name: str, misfits: set[str], config: ModelConfig) -> bool:
    """Tensors that checkpoints carry along and the model computes or shares by itself."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    # The scales of a matrix that does not fit: the matrix is reported.
    return name.endswith(_SCALE_SUFFIX) and name.removesuffix(_SCALE_SUFFIX) in misfits


def _read(plan: _Plan, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors, file by file. Nothing stays mapped for long: pages that were read count as the process's memory."""
    for path, names in _mappings(plan):
        with open_file(path) as file:
            for name in names:
                source = plan.sources[name]
                stored: Tensor = file.get_tensor(name)
                target = torch.empty(stored.shape, dtype=source.dtype, device=device)
                if source.scale is None:
                    target.copy_(stored)
                else:
                    assert plan.tile is not None
                    _dequantise(target, stored, _scales(source, path, file), plan.tile)
                yield name, target


def _mappings(plan: _Plan) -> Iterator[tuple[Path, list[str]]]:
    """Which tensors to read each time a file is opened."""
    for path, in_file in groupby(plan.sources, lambda name: plan.sources[name].file):
        names: list[str] = []
        num_bytes = 0
        for name in in_file:
            names.append(name)
            num_bytes += plan.sources[name].num_bytes
            if num_bytes >= _MAX_MAPPED_BYTES:
                yield path, names
                names, num_bytes = [], 0
        if names:
            yield path, names


def _scales(source: _Source, path: Path, file: Any) -> Tensor:
    assert source.scale is not None
    assert source.scale_file is not None
    if source.scale_file == path:
        return file.get_tensor(source.scale)
    with open_file(source.scale_file) as other:
        return other.get_tensor(source.scale)


def _dequantise(target: Tensor, stored: Tensor, scales: Tensor, tile: tuple[int, int]) -> None:
    """target <- stored value * scale of its tile, the product taken in float32. Last tiles may be partial."""
    rows, columns = stored.shape
    tile_rows, tile_columns = tile
    step = max(1, _SLAB_BYTES // (4 * max(columns, 1) * tile_rows)) * tile_rows
    scales = scales.to(target.device, torch.float32).repeat_interleave(tile_columns, 1)[:, :columns]
    for start in range(0, rows, step):
        slab = stored[start : start + step].to(target.device).float()
        of_rows = scales[start // tile_rows : math.ceil((start + step) / tile_rows)]
        slab *= of_rows.repeat_interleave(tile_rows, 0)[: slab.shape[0]]
        target[start : start + step].copy_(slab)


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, torch.nn.Parameter(tensor, requires_grad=False))


def _weights_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
