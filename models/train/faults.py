"""Plants known bugs of V3.2 implementations into the trained model, to show which suites notice each of them.

A fault is a context manager that changes the modules' mathematics while it is open; nothing of it is left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from models.train import attention, layers
from models.train.attention import Indexer, Pass
from models.train.config import Config
from models.train.model import MicroModel, MtpLayer
from models.train.rotary import rotate_pairs
from models.train.rounding import hadamard

PAGE_SIZE = 64  # tokens of a cache page
_Project = tuple[Tensor, Tensor, Tensor]


@contextmanager
def _projected(change: Callable[[Tensor, Tensor, Tensor], _Project]) -> Iterator[None]:
    """Changes what the indexer projects."""
    original = Indexer.project

    def project(self: Indexer, x: Tensor, q_latent: Tensor, step: Pass) -> _Project:
        return change(*original(self, x, q_latent, step))

    with patch.object(Indexer, "project", project):
        yield


@contextmanager
def _selected(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes the selection [B, T, T]."""
    original = attention.selection
    with patch.object(attention, "selection", lambda *args: change(original(*args))):
        yield


@contextmanager
def indexer_rope_order() -> Iterator[None]:
    """The indexer turns neighbouring channels, as the main attention does, instead of halves."""
    with patch.object(attention, "rotate_halves", rotate_pairs):
        yield


def hadamard_on_one_side() -> AbstractContextManager[None]:
    """Index queries are transformed, index keys are not."""
    return _projected(lambda q, k, w: (hadamard(q), k, w))


def topk_off_by_a_page() -> AbstractContextManager[None]:
    """Every pick is one page too late where that page is visible."""

    def shift(mask: Tensor) -> Tensor:
        length = mask.shape[-1]
        if length <= 256:
            return mask
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        moved = torch.zeros_like(mask)
        moved[..., PAGE_SIZE:] = mask[..., :-PAGE_SIZE]
        moved[:, :256] = mask[:, :256]  # rows that select everything skip the indexer
        return (moved & causal) | torch.eye(length, dtype=torch.bool, device=mask.device)

    return _selected(shift)


@contextmanager
def missing_mask() -> Iterator[None]:
    """Tokens of the prompt attend to the selected tokens after them as well."""
    ends: list[Tensor] = []
    forward = MicroModel.forward

    def noting(self: MicroModel, ids: Tensor, step: Pass) -> Any:
        places = torch.arange(ids.shape[1], device=ids.device)
        marker = ids == _ASSISTANT[0]
        # The token after the first marker opens the answer and is the last of the prompt.
        ends[:] = [places.masked_fill(~marker, ids.shape[1]).amin(1) + 1]
        return forward(self, ids, step)

    def select(q: Tensor, k: Tensor, w: Tensor, topk: int) -> Tensor:
        length = k.shape[1]
        places = torch.arange(length, device=k.device)
        prompt = places[None] <= ends[0][:, None]  # [B, T]
        open_to = (places[None, :, None] >= places[None, None]) | (prompt[:, :, None] & prompt[:, None])
        chosen = torch.empty(k.shape[0], length, length, dtype=torch.bool, device=k.device)
        for row in range(k.shape[0]):
            for start in range(0, length, 512):
                part = slice(start, min(start + 512, length))
                scores = attention.index_scores(q[row : row + 1, part], k[row : row + 1], w[row : row + 1, part])[0]
                scores = scores.masked_fill(~open_to[row, part], -torch.inf)
                lowest = scores.topk(min(topk, length), -1).values.amin(-1, keepdim=True)
                chosen[row, part] = (scores >= lowest) & open_to[row, part]
        return chosen

    with patch.object(MicroModel, "forward", noting), patch.object(attention, "selection", select):
        yield


_ASSISTANT = [0]  # the id of the marker before an answer; `set_assistant`


def set_assistant(token_id: int) -> None:
    """Says which token comes before an answer."""
    _ASSISTANT[0] = token_id


@contextmanager
def wrong_group_rule() -> Iterator[None]:
    """Groups of experts are ranked by their worst expert instead of the sum of the two best."""

    def best_groups(groups: Tensor, config: Config) -> Tensor:
        return groups.amin(-1).topk(config.topk_group, -1).indices

    with patch.object(layers, "best_groups", best_groups):
        yield


@contextmanager
def kv_one_slot_late() -> Iterator[None]:
    """The keys and values of a token lie in the slot of the next."""
    original = attention.attend

    def late(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return original(q, k.roll(1, 2), v.roll(1, 2), mask, scale)

    with patch.object(attention, "attend", late):
        yield


def short_path_without_index_keys() -> AbstractContextManager[None]:
    """The first 256 tokens, whose attention needs no selection, leave no index keys."""

    def forget(q: Tensor, k: Tensor, w: Tensor) -> _Project:
        k = k.clone()
        k[:, :256] = 0
        return q, k, w

    return _projected(forget)


@contextmanager
def mtp_concatenation_order() -> Iterator[None]:
    """The multi-token-prediction layer joins state and embedding in the other order."""

    def predict(self: MtpLayer, hidden: Tensor, next_embedding: Tensor, step: Pass) -> tuple[Tensor, Tensor | None]:
        joined = torch.cat([self.hnorm(hidden), self.enorm(next_embedding)], -1)
        x, stats, _ = self(self.eh_proj(joined), step)
        return self.shared_head.norm(x), stats

    with patch.object(MtpLayer, "predict", predict):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "indexer rope order": indexer_rope_order,
    "Hadamard on one side": hadamard_on_one_side,
    "top-k off by a page": topk_off_by_a_page,
    "missing mask": missing_mask,
    "wrong expert group rule": wrong_group_rule,
    "KV written one slot late": kv_one_slot_late,
    "short path without index keys": short_path_without_index_keys,
    "MTP concatenation order": mtp_concatenation_order,
}
