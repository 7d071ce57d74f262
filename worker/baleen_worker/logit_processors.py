"""Logit processors: code of the operator that changes a request's logits, chosen by name in the request.

A plugin is found at the start of the worker, by the flag `--logit-processor NAME=MODULE:ATTRIBUTE` or by an entry
point of the group `baleen.logit_processors`; a request can only name it. Owns finding, loading and calling; what raises
or answers nonsense ends the request that asked for it, and no other.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

ENTRY_POINT_GROUP = "baleen.logit_processors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a plugin may look at: the request's tokens so far."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class LogitProcessor(Protocol):
    """A plugin: any callable of this form. It is called once for each token of a request that names it."""

    def __call__(self, logits: Tensor, context: ProcessorContext, /) -> Tensor:
        """logits [V] float32, its own to write to -> [V] of the same type; -inf forbids a token."""
        ...


class LogitProcessorError(Exception):
    """A plugin failed on one request; the message says which and how."""


def installed() -> dict[str, str]:
    """Plugins that installed distributions offer: name -> "module:attribute". Nothing of them is imported."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def load(places: Mapping[str, str]) -> dict[str, LogitProcessor]:
    """Imports plugins, name -> "module:attribute". Raises ValueError with a sentence for the operator."""
    loaded: dict[str, LogitProcessor] = {}
    for name, place in places.items():
        module_name, _, path = place.partition(":")
        try:
            found = importlib.import_module(module_name)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise ValueError(f"logit processor {name}: {place} cannot be loaded: {error}") from error
        if not callable(found):
            raise ValueError(f"logit processor {name}: {place} is not callable: name a function")
        loaded[name] = cast("LogitProcessor", found)
    return loaded


def apply(name: str, processor: LogitProcessor, logits: Tensor, context: ProcessorContext) -> Tensor:
    """What a plugin makes of logits [V]. Raises LogitProcessorError."""
    try:
        changed = processor(logits, context)
    except Exception as error:
        logger.exception("logit processor %s raises", name)
        raise LogitProcessorError(f"logit processor {name} raised {type(error).__name__}") from error
    if getattr(changed, "shape", None) != logits.shape or changed.dtype != logits.dtype:
        raise LogitProcessorError(f"logit processor {name} did not return logits of the form that it was given")
    if not changed.amax().isfinite():
        raise LogitProcessorError(f"logit processor {name} left no token to choose: its largest logit is not finite")
    return changed
