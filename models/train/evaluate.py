"""Scores the training model directly: a right answer is one whose every token the model would have chosen greedily.

All expected answers are the only right ones, so one pass over the conversation with the expected answer in place says
what greedy decoding would write. It also says how often the multi-token-prediction layer drafts what the model chooses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from baleen_eval.texts.conversation import Conversation
from tokenizers import Tokenizer
from torch import Tensor

from models.data.mixture import Encoder
from models.train.attention import Mode, Pass
from models.train.model import MicroModel
from models.train.rotary import table


@dataclass(slots=True)
class Score:
    """Right answers of each bucket, and drafts that the model would have taken."""

    right: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    drafts: list[int] = field(default_factory=lambda: [0, 0])

    def table(self) -> dict[str, Any]:
        """Accuracy in all and of each bucket, and tokens per step with one draft."""
        hits, total = (
            sum(values) for values in zip(*(v for k, v in self.right.items() if " at " not in k), strict=True)
        )
        return {
            "n": total,
            "accuracy": round(hits / total, 4),
            "by_bucket": {key: round(a / b, 4) for key, (a, b) in self.right.items()},
            "tokens_per_step": round(1 + self.drafts[0] / max(1, self.drafts[1]), 3),
        }


@torch.no_grad()
def score(
    model: MicroModel,
    tokenizer: Tokenizer,
    conversations: Iterator[Conversation],
    *,
    mode: Mode,
    batch_tokens: int,
    pattern: str = "",
) -> dict[str, Any]:
    """Scores conversations in batches of similar length, with layers that reuse selections where `pattern` says so."""
    encode, device = Encoder(tokenizer), model.lm_head.weight.device
    encoded = [(*encode(conversation), conversation.info) for conversation in conversations]
    encoded.sort(key=lambda item: len(item[0]))
    result = Score()
    model.eval()
    while encoded:
        # Rows are padded to a multiple, so that few shapes occur.
        longest = -(-len(encoded[-1][0]) // 128) * 128
        count = max(1, batch_tokens // longest)
        batch, encoded = encoded[-count:], encoded[:-count]
        ids = torch.full((len(batch), longest), 2)
        learned = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, (row_ids, weights, _) in enumerate(batch):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            learned[row, : len(row_ids)] = torch.tensor(weights) == 1.0
        main, draft = predictions(model, ids.to(device), mode, pattern)
        _count(result, ids.to(device), learned.to(device), main, draft, [info for _, _, info in batch])
    return result.table()


def predictions(model: MicroModel, ids: Tensor, mode: Mode, pattern: str = "") -> tuple[Tensor, Tensor]:
    """ids [B, T] -> the model's choice after each position [B, T], and the draft for the position after that [B, T]."""
    cos, sin = table(model.config, ids.shape[1], ids.device)
    step = Pass(mode, cos, sin, pattern=pattern)
    hidden, _ = model(ids, step)
    main = model.logits(hidden).argmax(-1)
    next_ids = torch.cat([ids[:, 1:], ids[:, -1:]], 1)
    draft = model.logits(model.mtp(hidden, next_ids, step)[0]).argmax(-1)
    return main, draft


def _count(
    result: Score, ids: Tensor, learned: Tensor, main: Tensor, draft: Tensor, infos: list[dict[str, Any]]
) -> None:
    right = ((main[:, :-1] == ids[:, 1:]) | ~learned[:, 1:]).all(1)
    for row, info in enumerate(infos):
        bucket = str(info.get("length", "all"))
        result.right[bucket][0] += int(right[row])
        result.right[bucket][1] += 1
        if info.get("depth") is not None:
            cell = result.right[f"{bucket} at {info['depth']:.1f}"]
            cell[0] += int(right[row])
            cell[1] += 1
    # A draft for position i + 2 is made after position i; it counts where both tokens are the model's own.
    both = learned[:, 1:-1] & learned[:, 2:]
    result.drafts[0] += int(((draft[:, :-2] == main[:, 1:-1]) & both).sum())
    result.drafts[1] += int(both.sum())


@torch.no_grad()
def generate(model: MicroModel, ids: list[int], *, max_tokens: int, eos: int = 1, mode: Mode = Mode.DENSE) -> list[int]:
    """Greedy continuation, computing everything anew for each token: for a look at short texts."""
    device = model.lm_head.weight.device
    out: list[int] = []
    model.eval()
    while len(out) < max_tokens and (not out or out[-1] != eos):
        row = torch.tensor([ids + out], device=device)
        cos, sin = table(model.config, row.shape[1], device)
        hidden, _ = model(row, Pass(mode, cos, sin))
        out.append(int(model.logits(hidden[:, -1]).argmax(-1)))
    return out
