"""What one forward pass needs besides token ids: where each token sits, which keys it sees, where keys are kept.

The runner builds a `ForwardContext` from a step plan; the storage implements `KvPools`. This file owns neither: it is
the contract between them and the model.

Legend: T new tokens of the step, n keys, C width of the latent, R width of the rotary key, D width of an index key.
A *slot* of the pools is `page * page_size + offset`; page 0 is a sink that belongs to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """The consecutive tokens of one request in the flat batch.

    Its tokens are `start .. start + num_tokens` of the batch and sit at the last `num_tokens` of its `context_len`
    positions. Keys of all earlier positions are already in the pools, in every layer.

    page_table: [>= ceil(context_len / page_size)] integer, on the model's device; position p lives in slot
    `page_table[p // page_size] * page_size + p % page_size`.
    is_prefill: the tokens are a piece of a prompt (or of a prompt computed again); otherwise sampled tokens. It steers
    only which of two equal forms of attention is computed.
    """

    start: int
    num_tokens: int
    context_len: int
    page_table: Tensor
    is_prefill: bool


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's batch. Rows follow each other without gaps and cover all T tokens.

    positions: [T] int64, place of each token in its request, from 0.
    kv_slots: [T] int64, the slot that takes the keys of each token; equals what the page tables say.
    """

    positions: Tensor
    kv_slots: Tensor
    rows: Sequence[ForwardRow]
    page_size: int


class KvPools(Protocol):
    """Stores of the attention's state, per layer, addressed by slot. Slots are int64 tensors on the pools' device.

    What is written may be rounded to the pool's format (FP8, bfloat16); reading returns the stored values in the
    model's compute dtype. The model always attends to what it reads back, so prefill and decode see the same keys.
    Writing slots of page 0 is allowed and leaves no trace that any row may rely on.
    """

    def write_latent(self, layer: int, kv_slots: Tensor, kv_latent: Tensor, k_rope: Tensor) -> None:
        """Stores normalised latents [T, C] and rotated rope keys [T, R] in the slots [T]."""
        ...

    def read_latent(self, layer: int, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns latents [n, C] and rope keys [n, R] of the slots [n]; a slot may occur more than once."""
        ...

    def write_index_k(self, layer: int, kv_slots: Tensor, index_k: Tensor) -> None:
        """Stores index keys [T, D] (after norm, rotation and, where the model uses it, Hadamard) in the slots [T]."""
        ...

    def read_index_k(self, layer: int, kv_slots: Tensor) -> Tensor:
        """Returns index keys [n, D] of the slots [n]; a slot may occur more than once."""
        ...
