"""The circumstances under which an answer must stay the same, and which of their combinations are tried.

A `Circumstances` is one point of a product of factors. The whole product takes long; a covering choice, in which every
pair of values of any two factors occurs, takes a tenth of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baleen_worker.cache.host import WritePolicy

PAGE_SIZE = 64
WHOLE = 4096


@dataclass(frozen=True)
class Circumstances:
    """How the subjects of a run are computed.

    `chunk`: tokens a step may compute, in which prompts are cut. `prefix`: what the cache knows of a prompt: there is
    no cache ("off"), nothing ("miss"), all of it ("hit"), pages of it that end in its midst ("part"), or all of it but
    in host memory alone, where pages go when the device evicts them ("host-back") or as soon as they are full
    ("host-through"); then the device evicts whatever nobody holds before every step.
    `neighbours`: requests that run beside each subject all the time. `displaced`: each subject loses its place to
    somebody more important after every step it took part in. `depth`: steps in flight, 2 being overlap.
    """

    chunk: int = WHOLE
    prefix: str = "off"
    neighbours: int = 0
    displaced: bool = False
    depth: int = 1

    @property
    def write_policy(self) -> WritePolicy | None:
        """Of the host tier, where there is one."""
        return {"host-back": WritePolicy.WRITE_BACK, "host-through": WritePolicy.WRITE_THROUGH}.get(self.prefix)

    def __str__(self) -> str:
        parts = [f"chunk{self.chunk}", f"prefix-{self.prefix}", f"{self.neighbours}-neighbours"]
        return "-".join([*parts, *["displaced"] * self.displaced, *["overlap"] * (self.depth > 1)])


FACTORS: dict[str, Sequence[Any]] = {
    "chunk": (64, 128, WHOLE),
    "prefix": ("off", "miss", "hit", "part", "host-back", "host-through"),
    "neighbours": (1, 4, 32),
    "displaced": (False, True),
    "depth": (1, 2),
}


def product(factors: Mapping[str, Sequence[Any]] = FACTORS) -> list[Circumstances]:
    """Every combination."""
    return [Circumstances(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values())]


def covering(factors: Mapping[str, Sequence[Any]] = FACTORS) -> list[Circumstances]:
    """Few combinations in which every pair of values of two factors occurs, the same at every call."""
    every = product(factors)
    missing = set().union(*(_pairs(point, factors) for point in every))
    chosen: list[Circumstances] = []
    while missing:
        best = max(every, key=lambda point: len(_pairs(point, factors) & missing))
        chosen.append(best)
        missing -= _pairs(best, factors)
    return chosen


def _pairs(point: Circumstances, factors: Iterable[str]) -> set[tuple[str, Any, str, Any]]:
    return {(a, getattr(point, a), b, getattr(point, b)) for a, b in itertools.combinations(factors, 2)}
