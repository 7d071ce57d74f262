"""The stages of training, in order.

Lengths grow, the indexer is warmed up, then attention is sparse to the end. The last stages teach the indexer of a
layer what the layer after it attends to as well, so that both can go by its selection (IndexCache).
"""

from __future__ import annotations

from dataclasses import dataclass

from models.data.mixture import Shares
from models.train.attention import Mode

EVEN = Shares()
MORE_TOOLS = Shares(needle=0.28, track=0.18, arith=0.12, tools=0.34, talk=0.05)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: rows of `row_len` tokens, `num_rows` of them in a batch, for `seconds` or `max_steps`.

    The learning rate goes linearly from `lr` to `lr_end`. `num_sampled` positions of each row train the indexer.
    `round_weights`: weights are seen as block FP8 rounds them. `patterns`: which layers reuse selections
    (`Pass.pattern`), a step each in turn.
    """

    name: str
    mode: Mode
    row_len: int
    num_rows: int
    seconds: float
    lr: float
    lr_end: float
    num_sampled: int = 0
    round_weights: bool = False
    max_steps: int = 1_000_000
    shares: Shares = EVEN
    patterns: tuple[str, ...] = ("",)


STAGES = {
    stage.name: stage
    for stage in (
        Stage("dense", Mode.DENSE, 1024, 128, 180, 2e-3, 2e-3),
        Stage("dense-4k", Mode.DENSE, 4096, 32, 60, 2e-3, 1e-3),
        Stage("warm-up", Mode.WARM_UP, 4096, 32, 60, 2e-3, 1e-3, num_sampled=64),
        Stage("sparse", Mode.SPARSE, 4096, 32, 110, 1.5e-3, 1e-3, num_sampled=64, round_weights=True),
        Stage("tools", Mode.SPARSE, 2048, 64, 100, 1e-3, 1e-3, num_sampled=64, round_weights=True, shares=MORE_TOOLS),
        Stage("long", Mode.SPARSE, 16896, 8, 180, 1e-3, 2e-5, num_sampled=64, round_weights=True, shares=MORE_TOOLS),
        Stage("share", Mode.SHARE, 4096, 32, 25, 1e-3, 5e-4, num_sampled=64, round_weights=True, patterns=("FSF",)),
        Stage(
            "share-long", Mode.SHARE, 16896, 8, 55, 5e-4, 2e-5, num_sampled=64, round_weights=True, patterns=("FSF",)
        ),
        Stage("smoke-dense", Mode.DENSE, 96, 2, 600, 1e-3, 1e-3, max_steps=3),
        Stage("smoke-warm", Mode.WARM_UP, 96, 1, 600, 1e-3, 1e-3, num_sampled=8, max_steps=2),
        Stage("smoke-sparse", Mode.SPARSE, 320, 1, 600, 1e-3, 1e-3, num_sampled=8, round_weights=True, max_steps=2),
        Stage(
            "smoke-share", Mode.SHARE, 320, 1, 600, 1e-3, 1e-3, 8, round_weights=True, max_steps=2, patterns=("FSF",)
        ),
    )
}
