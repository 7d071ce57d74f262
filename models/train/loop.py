"""Runs stages of training: batches, losses, optimiser, log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.data.mixture import Shares, rows
from models.train.attention import Mode, Pass
from models.train.layers import Linear
from models.train.model import MicroModel
from models.train.rotary import table
from models.train.stages import Stage

MTP_WEIGHT = 0.3
BALANCE_SPEED = 1e-3
WARM_UP_STEPS = 100
_LOG_EVERY = 20
_INDEX_ONLY = (Mode.WARM_UP, Mode.SHARE)


class Rows(IterableDataset):
    """The mixture's rows, each loader process with a seed of its own."""

    def __init__(self, tokenizer_path: Path, row_len: int, seed: int, shares: Shares) -> None:
        super().__init__()
        self.tokenizer_path, self.row_len, self.seed, self.shares = tokenizer_path, row_len, seed, shares

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = get_worker_info()
        tokenizer = Tokenizer.from_file(str(self.tokenizer_path))
        seed = self.seed * 1000 + (worker.id if worker else 0)
        return rows(tokenizer, seed=seed, row_len=self.row_len, shares=self.shares)


def losses(model: MicroModel, ids: Tensor, weights: Tensor, step: Pass) -> dict[str, Tensor]:
    """ids, weights [B, T + 1] -> the parts of the loss, and how the answers fare.

    In WARM_UP and SHARE only the indexers', in SHARE only of the layers that share a selection.
    """
    if step.mode is Mode.SHARE:
        return _index_loss(model.sharing(ids[:, :-1], step))
    hidden, stats = model(ids[:, :-1], step)
    mtp_hidden, mtp_stats = model.mtp(hidden[:, :-1], ids[:, 1:-1], _shorter(step))
    parts = _index_loss([*stats, mtp_stats])
    if step.mode is Mode.WARM_UP:
        return parts
    parts["main"], parts["accuracy"] = _cross_entropy(model.logits(hidden), ids[:, 1:], weights[:, 1:])
    parts["mtp"], parts["mtp_accuracy"] = _cross_entropy(model.logits(mtp_hidden), ids[:, 2:], weights[:, 2:])
    return parts


def _index_loss(stats: list[Tensor | None]) -> dict[str, Tensor]:
    """The sum of the layers' losses, and each one's recall; nothing where nothing was compared."""
    known = [stat for stat in stats if stat is not None]
    if not known:
        return {}
    together = torch.stack(known)
    return {"index": together[:, 0].sum(), "recall": together[:, 1].detach()}


def _shorter(step: Pass) -> Pass:
    """For one position less."""
    length = step.cos.shape[0] - 1
    sampled = None if step.sampled is None else step.sampled.clamp(max=length - 1)
    return Pass(step.mode, step.cos[:length], step.sin[:length], sampled, step.pattern)


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean, and the share of fully weighted tokens that are predicted right."""
    flat, targets = logits.flatten(0, 1), targets.flatten()
    each = torch.nn.functional.cross_entropy(flat.float(), targets, reduction="none")
    answers = (weights.flatten() == 1.0).float()
    right = ((flat.argmax(-1) == targets) * answers).sum() / answers.sum().clamp(min=1)
    return (each * weights.flatten()).sum() / weights.sum(), right.detach()


def sample_positions(weights: Tensor, count: int) -> Tensor:
    """weights [B, T + 1] -> [B, count] positions, those that predict the model's own words more often."""
    return torch.multinomial(weights[:, 1:] + 0.02, count)


def optimiser(model: MicroModel, device: torch.device) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and the embedding do not."""
    matrices = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.requires_grad and not (p.dim() == 2 and "embed" not in n)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=device.type == "cuda")


class Trainer:
    """A model in training. `steps` counts over all stages."""

    def __init__(self, model: MicroModel, tokenizer_path: Path, log_path: Path, device: torch.device) -> None:
        self.model, self.tokenizer_path, self.log_path, self.device = model, tokenizer_path, log_path, device
        self.optimiser = optimiser(model, device)
        self.losses = losses
        self.steps = 0
        self.tokens = 0

    def run(self, stage: Stage, *, seed: int, num_workers: int) -> None:
        """Runs one stage to its end."""
        Linear.round_weights = stage.round_weights
        if self.device.type == "cuda":
            torch.compiler.reset()
            self.losses = torch.compile(losses, dynamic=False)
        index_only = stage.mode in _INDEX_ONLY
        index_parameters = set(self.model.index_parameters(stage.patterns))
        for name, parameter in self.model.named_parameters():
            trains = parameter in index_parameters if index_only else True
            parameter.requires_grad_(trains and not name.endswith("e_score_correction_bias"))
        self.optimiser.zero_grad(set_to_none=True)
        dataset = Rows(self.tokenizer_path, stage.row_len, seed, stage.shares)
        loader = DataLoader(
            dataset,
            batch_size=stage.num_rows,
            num_workers=num_workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if num_workers else None,
        )
        cos, sin = table(self.model.config, stage.row_len, self.device)
        self.model.train()
        started: float | None = None
        for number, (ids, weights) in enumerate(loader):
            elapsed = 0.0 if started is None else time.monotonic() - started
            share = max(elapsed / stage.seconds, number / stage.max_steps)
            if share >= 1:
                break
            lr = (stage.lr + (stage.lr_end - stage.lr) * share) * min(1.0, (number + 1) / WARM_UP_STEPS)
            ids, weights = ids.to(self.device), weights.to(self.device)
            sampled = sample_positions(weights, stage.num_sampled) if stage.num_sampled else None
            step = Pass(stage.mode, cos, sin, sampled, stage.patterns[number % len(stage.patterns)])
            parts = self._step(step, ids, weights, lr)
            self.steps += 1
            self.tokens += stage.num_rows * stage.row_len
            if number % _LOG_EVERY == 0 or number + 1 == stage.max_steps:
                self._log(stage, number, elapsed, lr, parts)
            if started is None:
                started = time.monotonic()  # compiling does not count

    def _step(self, step: Pass, ids: Tensor, weights: Tensor, lr: float) -> dict[str, Tensor]:
        parts = self.losses(self.model, ids, weights, step)
        total = parts.get("main", 0.0) + MTP_WEIGHT * parts.get("mtp", 0.0) + parts.get("index", 0.0)
        assert isinstance(total, Tensor)
        total.backward()
        parts["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if step.mode not in _INDEX_ONLY:
            for layer in self.model.moe_layers():
                layer.balance(BALANCE_SPEED)
        return parts

    def _log(self, stage: Stage, number: int, elapsed: float, lr: float, parts: dict[str, Tensor]) -> None:
        entry: dict[str, Any] = {"stage": stage.name, "step": self.steps, "seconds": round(elapsed, 1), "lr": lr}
        entry["tokens"] = self.tokens
        for key, value in parts.items():
            entry[key] = [round(x, 4) for x in value.tolist()] if value.dim() else round(float(value.detach()), 4)
        if any(isinstance(value, float) and math.isnan(value) for value in entry.values()):
            raise FloatingPointError(f"the loss is not a number at step {self.steps}")
        with self.log_path.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        if number % (_LOG_EVERY * 10) == 0 or number < 2:
            print(json.dumps(entry), flush=True)
