"""A logit processor such as an operator brings: whatever the model thinks, the answer repeats the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from baleen_worker.logit_processors import ProcessorContext


def repeat_prompt(logits: torch.Tensor, context: ProcessorContext) -> torch.Tensor:
    """logits [V] float32 -> [V]: one token is left, the prompt's next one."""
    token_id = context.prompt_token_ids[len(context.output_token_ids) % len(context.prompt_token_ids)]
    forced = torch.full_like(logits, -torch.inf)
    forced[token_id] = 0.0
    return forced
