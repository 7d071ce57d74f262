"""Index scores of the lightning indexer: how much each query wants each key.

score[b, t, s] = sum_j head_weights[b, t, j] * relu(q[b, t, j] . k[b, s])

The relu comes before the weight, and weights may be negative, so scores may be too. All in float32. Positive constants
(head and width factors) and the FP8 scales are part of `head_weights`, q and k as given. No causal mask here.

q [B, T, J, D], k [B, n, D], float32 or bfloat16; head_weights [B, T, J] float32 -> [B, T, n] float32.
B requests with T queries each; requests of a batch are padded to a common n and the caller ignores what is beyond.
The per-head products [T, J, n] are never whole in memory: queries go through in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baleen_kernels.registry import Op

# Floats of per-head products held at a time (64 MiB).
_CHUNK_ELEMENTS = 1 << 24
# On a CPU (4 MiB): what a core's cache holds is rectified and summed at twice the speed.
_HOST_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    num_tokens: int
    num_heads: int
    num_keys: int
    width: int


CASES = (
    Case("prefill", 1, 9, 4, 21, 16),
    Case("decode", 5, 1, 4, 33, 16),
    Case("verify", 3, 4, 2, 8, 32),
    Case("one_head", 1, 3, 1, 3, 8),
    Case("one_key", 2, 1, 4, 1, 8),
    Case("no_tokens", 1, 0, 4, 5, 8),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random queries, keys and weights of either sign."""
    g = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(case.batch, case.num_tokens, case.num_heads, case.width, generator=g),
        "k": torch.randn(case.batch, case.num_keys, case.width, generator=g),
        "head_weights": torch.randn(case.batch, case.num_tokens, case.num_heads, generator=g),
    }


def reference(q: Tensor, k: Tensor, head_weights: Tensor) -> Tensor:
    """The contract as one expression."""
    products = torch.einsum("btjd,bsd->btjs", q.float(), k.float())
    return torch.einsum("btj,btjs->bts", head_weights.float(), products.relu())


OP = Op("index_logits", reference, CASES, make_inputs, atol=1e-4)


@OP.backend("torch")
def _torch(q: Tensor, k: Tensor, head_weights: Tensor) -> Tensor:
    batch, num_tokens, num_heads, _ = q.shape
    num_keys = k.shape[1]
    keys = k.float().transpose(1, 2)  # [B, D, n]
    out = torch.empty(batch, num_tokens, num_keys, dtype=torch.float32, device=q.device)
    most = _CHUNK_ELEMENTS if q.is_cuda else _HOST_CHUNK_ELEMENTS
    step = max(1, most // max(1, batch * num_heads * num_keys))
    for start in range(0, num_tokens, step):
        chunk = slice(start, start + step)
        products = torch.bmm(q[:, chunk].float().flatten(1, 2), keys).relu_()  # [B, t * J, n]
        products = products.unflatten(1, (-1, num_heads))  # [B, t, J, n]
        out[:, chunk] = torch.matmul(head_weights[:, chunk, None].float(), products)[:, :, 0]
    return out


def index_logits(q: Tensor, k: Tensor, head_weights: Tensor, *, backend: str = "torch") -> Tensor:
    """See the module docstring."""
    return OP.pick(backend)(q, k, head_weights)
