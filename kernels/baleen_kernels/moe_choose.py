"""The choice of experts for a few tokens, from their activations to the tiles that the experts work on.

The shared expert is listed as one more expert that every token picks with weight 1, so that its weights are read in the
same stream as the others'.

  logits = y . router, or `scores` where these are given; experts and weights as in `moe_route`;
  pick j of token t is numbered t * (k + 1) + j, and pick k is that of the shared expert, which is expert E.

y [T, H], router [E, H], both bfloat16 or both float32, T at most 16; bias [E] float32; scores [T, E] float32 or None
  -> weights [T, k + 1] float32; tile_expert [B] int32, -1 in tiles without one; tile_picks [B, 16] int32, -1 in rows
  without one; B = `most_tiles`. Tiles are those of `moe_tiles`: experts and picks ascending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baleen_kernels import expert_tiles, moe_route, wide_gemm
from baleen_kernels.machine import HOPPER, Needs
from baleen_kernels.registry import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_TOKENS = expert_tiles.TILE_ROWS


def most_tiles(num_tokens: int, num_experts: int, topk: int) -> int:
    """B: an expert has no more picks than there are tokens, so one tile holds them."""
    return min(num_tokens * topk, num_experts) + 1


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_tokens: int
    num_experts: int = 256
    width: int = 512
    num_groups: int = 8
    topk_groups: int = 4
    topk: int = 8
    normalize: bool = True
    given: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("one_token", 1),
    Case("tokens", 5),
    Case("most_tokens", MOST_TOKENS),
    Case("released", 3, width=7168),
    Case("crowded", 13, num_experts=16, num_groups=4, topk_groups=2, topk=4),
    Case("given_scores", 4, given=True),
    Case("few_experts", 2, num_experts=8, num_groups=1, topk_groups=1, topk=2, normalize=False),
    Case("float32", 7, num_experts=64, width=256, dtype=torch.float32),
)


def make_inputs(case: Case) -> dict[str, Any]:
    """Random tokens and weights; logits are far enough from each other for every order of summation."""
    g = torch.Generator().manual_seed(case.num_tokens)
    shape = case.num_tokens, case.num_experts
    return {
        "y": torch.randn(case.num_tokens, case.width, generator=g).to(case.dtype),
        "router": (torch.randn(case.num_experts, case.width, generator=g) * case.width**-0.5).to(case.dtype),
        "bias": 0.1 * torch.randn(case.num_experts, generator=g),
        "scores": torch.randn(shape, generator=g) if case.given else None,
        "num_groups": case.num_groups,
        "topk_groups": case.topk_groups,
        "topk": case.topk,
        "normalize": case.normalize,
        "scaling_factor": 2.5,
    }


def _listed(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """With the shared expert as the last pick of every token."""
    shared = torch.full_like(ids[:, :1], num_experts)
    return torch.cat([ids, shared], 1), torch.cat([weights, torch.ones_like(weights[:, :1])], 1)


def reference(
    y: Tensor, router: Tensor, bias: Tensor, scores: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract through those of its parts."""
    num_experts = router.shape[0]
    logits = wide_gemm.reference(y, router) if scores is None else scores
    ids, weights = _listed(*moe_route.reference(logits, bias, **options), num_experts)
    owners, rows = expert_tiles.tiles_reference(ids, num_experts=num_experts + 1)
    size = most_tiles(*options_shape(y, router, options))
    return weights, owners[:size], rows[:size]


def options_shape(y: Tensor, router: Tensor, options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Arguments of `most_tiles`."""
    return y.shape[0], router.shape[0], options["topk"]


def canonical(inputs: Mapping[str, Any], outputs: list[Tensor]) -> list[Tensor]:
    """The outputs with -1 where the contract says nothing."""
    weights, *tiles = outputs
    return [weights, *expert_tiles.tiles_canonical(inputs, tiles)]


OP = Op("moe_choose", reference, CASES, make_inputs, canonical=canonical, atol=1e-4, rtol=1e-4)


@OP.backend("torch")
def _torch(
    y: Tensor, router: Tensor, bias: Tensor, scores: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = router.shape[0]
    logits = wide_gemm.wide_gemm(y, router) if scores is None else scores
    ids, weights = _listed(*moe_route.moe_route(logits, bias, **options), num_experts)
    owners, rows = expert_tiles.moe_tiles(ids, num_experts=num_experts + 1)
    size = most_tiles(*options_shape(y, router, options))
    return weights, owners[:size], rows[:size]


def _rejects_cuda(y: Tensor, router: Tensor, num_groups: int, topk: int, **_: Any) -> str | None:
    num_experts = router.shape[0]
    if y.shape[0] > MOST_TOKENS or topk > 8:
        return f"it takes at most {MOST_TOKENS} tokens of 8 picks, not {y.shape[0]} of {topk}"
    if num_experts not in (32, 64, 128, 256) or num_groups > 8 or num_experts % (32 * num_groups):
        return f"it takes up to 256 experts, a power of two, in groups of 32 or more, not {num_experts} in {num_groups}"
    return "it multiplies bfloat16 matrices" if y.dtype != torch.bfloat16 else None


@OP.backend("cuda", needs=Needs(archs=HOPPER, arch_note="a Hopper GPU", tools=("nvcc",)), rejects=_rejects_cuda)
def _cuda(
    y: Tensor, router: Tensor, bias: Tensor, scores: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from baleen_kernels.own import choice_kernel as own

    logits = wide_gemm.wide_gemm(y, router, backend="cublas")  # even if scores are given: a step without is too short
    num_tiles = most_tiles(*options_shape(y, router, options))
    return own.choose(logits if scores is None else scores, bias, num_tiles=num_tiles, **options)


def moe_choose(
    y: Tensor,
    router: Tensor,
    bias: Tensor,
    scores: Tensor | None = None,
    *,
    num_groups: int,
    topk_groups: int,
    topk: int,
    normalize: bool,
    scaling_factor: float,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module docstring."""
    return OP.pick(backend)(
        y,
        router,
        bias,
        scores,
        num_groups=num_groups,
        topk_groups=topk_groups,
        topk=topk,
        normalize=normalize,
        scaling_factor=scaling_factor,
    )
