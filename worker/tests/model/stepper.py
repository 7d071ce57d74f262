"""Drives the product's model step by step, as the runner does, and records what it computed.

A schedule is a list of steps; a step is a list of (sequence number, number of tokens). Pages are handed out in a random
order and from a pool full of garbage, so a wrong slot shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from baleen_worker.cache.storage import PAGE_SIZE_TOKENS, PagedPools, choose_layout
from baleen_worker.model.context import ForwardContext, ForwardRow, KvPools
from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM
from expectation import Computed, sorted_experts
from torch import Tensor

if TYPE_CHECKING:
    from baleen_worker.model.attention_plan import AbsorbedRows
    from torch.utils.hooks import RemovableHandle

PAGE_SIZE = PAGE_SIZE_TOKENS
Schedule = Sequence[Sequence[tuple[int, int]]]


def garbage_pools(model: DeepseekForCausalLM, num_pages: int, value: float | None = None) -> PagedPools:
    """The worker's pools in the model's own format, every slot filled with `value` or with large random numbers."""
    config, numerics = model.config, model.numerics
    layout = choose_layout(config, dtype=numerics.dtype, kv_cache_dtype="auto", index_hadamard=numerics.index_hadamard)
    pools = PagedPools(layout, num_pages, device=torch.device("cpu"), dtype=numerics.dtype)
    slots = torch.arange(num_pages * PAGE_SIZE)

    def garbage(width: int) -> Tensor:
        values = 1e4 * torch.randn(len(slots), width) if value is None else torch.full((len(slots), width), value)
        return values.to(numerics.dtype)

    for layer in range(config.num_hidden_layers):
        pools.write_latent(layer, slots, garbage(config.kv_lora_rank), garbage(config.qk_rope_head_dim))
        if config.index_layers[layer]:
            pools.write_index_k(layer, slots, garbage(config.index_head_dim))
    return pools


class Stepper:
    """Sequences in progress. `prompt_lens[i]` tokens of sequence i are computed as prefill, the rest as decode."""

    def __init__(
        self,
        model: DeepseekForCausalLM,
        sequences: Sequence[Tensor],
        prompt_lens: Sequence[int] | None = None,
        pools: KvPools | None = None,
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.prompt_lens = prompt_lens or [len(ids) for ids in sequences]
        self.done = [0] * len(sequences)
        pages = [-(-len(ids) // PAGE_SIZE) for ids in sequences]
        order = (torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)) + 1).tolist()
        self.page_tables = [torch.tensor([order.pop() for _ in range(count)]) for count in pages]
        self.pools = pools or garbage_pools(model, sum(pages) + 1)
        layers = model.config.num_hidden_layers
        self.logits = [torch.full((len(ids), model.config.vocab_size), torch.nan) for ids in sequences]
        self.allowed = [[torch.ones(len(ids), len(ids), dtype=torch.bool).tril()] * layers for ids in sequences]
        self.allowed = [[mask.clone() for mask in masks] for masks in self.allowed]
        self.experts: list[list[dict[int, tuple[Tensor, Tensor]]]] = [[{} for _ in ids] for ids in sequences]
        self._places: list[tuple[int, int]] = []  # (sequence, position) of each token of the current step

    def run(self, schedule: Schedule) -> list[Computed]:
        """Runs all steps; every sequence must end complete."""
        hooks = self._watch()
        for rows in schedule:
            self.step(rows)
        for hook in hooks:
            hook.remove()
        assert self.done == [len(ids) for ids in self.sequences]
        return [self._computed(sequence) for sequence in range(len(self.sequences))]

    @torch.no_grad()
    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        """Computes the next tokens of some sequences."""
        forward_rows: list[ForwardRow] = []
        self._places = []
        for sequence, count in rows:
            start, table = self.done[sequence], self.page_tables[sequence]
            is_prefill = start < self.prompt_lens[sequence]
            forward_rows.append(ForwardRow(len(self._places), count, start + count, table, is_prefill))
            self._places += [(sequence, position) for position in range(start, start + count)]
            self.done[sequence] += count
        positions = torch.tensor([position for _, position in self._places])
        slots = torch.tensor(
            [int(self.page_tables[s][p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for s, p in self._places]
        )
        ids = torch.stack([self.sequences[s][p] for s, p in self._places])
        context = ForwardContext(positions, slots, forward_rows, PAGE_SIZE)
        logits = self.model.compute_logits(self.model(ids, context, self.pools))
        for (sequence, position), row in zip(self._places, logits, strict=True):
            self.logits[sequence][position] = row

    def _watch(self) -> list[RemovableHandle]:
        hooks: list[RemovableHandle] = []
        for number, layer in enumerate(cast("Any", self.model.model.layers)):
            if layer.self_attn.indexer is not None:
                hook = layer.self_attn.indexer.register_forward_hook
                hooks.append(hook(lambda _m, args, out, number=number: self._on_picks(number, args[2], out)))
            if hasattr(layer.mlp, "gate"):
                hook = layer.mlp.gate.register_forward_hook
                hooks.append(hook(lambda _m, _args, out, number=number: self._on_experts(number, *out)))
        return hooks

    def _on_picks(self, layer: int, rows: AbsorbedRows, picks: Tensor) -> None:
        for token, chosen in zip(rows.tokens.tolist(), picks, strict=True):
            sequence, position = self._places[token]
            mask = self.allowed[sequence][layer][position]
            mask[:] = False
            mask[chosen[chosen >= 0].long()] = True

    def _on_experts(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        for (sequence, position), row_ids, row_weights in zip(self._places, ids, weights, strict=True):
            self.experts[sequence][position][layer] = (row_ids, row_weights)

    def _computed(self, sequence: int) -> Computed:
        experts = self.experts[sequence]
        pairs = [
            sorted_experts(torch.stack([e[layer][0] for e in experts]), torch.stack([e[layer][1] for e in experts]))
            for layer in sorted(experts[0])
        ]
        return Computed(
            self.logits[sequence], self.allowed[sequence], [ids for ids, _ in pairs], [weights for _, weights in pairs]
        )


def whole(*lengths: int) -> Schedule:
    """Every sequence in one step."""
    return [[(number, length) for number, length in enumerate(lengths)]]


def in_chunks(length: int, sizes: Sequence[int]) -> Schedule:
    """One sequence, in pieces of the sizes given, the last size repeated to the end."""
    steps: list[list[tuple[int, int]]] = []
    done = 0
    while done < length:
        size = min(sizes[min(len(steps), len(sizes) - 1)], length - done)
        steps.append([(0, size)])
        done += size
    return steps
