"""What serving in bfloat16 rounds beside the weights: cached latents, index queries and index keys, all to FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from models.train.attention import Attention, Indexer, Pass
from models.train.layers import E4M3_MAX
from models.train.model import MicroModel

GROUP = 128


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last axis."""
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.float() @ matrix * x.shape[-1] ** -0.5).to(x.dtype)


def through_fp8(x: Tensor) -> Tensor:
    """x [..., n * 128] rounded to e4m3 with a power-of-two scale for each group of 128 channels."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


@contextmanager
def deployed(model: MicroModel) -> Iterator[None]:
    """While open, the model rounds as serving does."""
    original = Indexer.project

    def project(self: Indexer, x: Tensor, q_latent: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, w = original(self, x, q_latent, step)
        return through_fp8(hadamard(q)), through_fp8(hadamard(k)), w

    with ExitStack() as stack:
        stack.enter_context(patch.object(Indexer, "project", project))
        for module in model.modules():
            if isinstance(module, Attention):
                hook = module.kv_a_layernorm.register_forward_hook(lambda _module, _args, out: through_fp8(out))
                stack.callback(hook.remove)
        yield
