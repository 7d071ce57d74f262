"""What a device's memory went to, for the operator. Owns no measurement."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30
# Of what all graphs are expected to take.
_GRAPH_MARGIN = 1.15


def expected_graph_bytes(largest: int, others: int, *, num_others: int, num_sizes: int) -> int:
    """What graphs of `num_sizes` sizes take, with a margin, from what the first few of them took.

    largest: bytes that the largest size took. others: bytes that `num_others` others took beyond it; the rest takes as
    much each. Both are measured when kernels are loaded and graphs have been captured before, which takes memory once.
    """
    each = max(0, others) / num_others if num_others else 0.0
    return int(_GRAPH_MARGIN * (max(0, largest) + (num_sizes - 1) * each))


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """All in bytes but `kv_tokens`, which is how many tokens the pages hold.

    free_before, free_after: of the device, before anything was loaded and when all is in place. weights_bytes: what the
    model holds. unused_bytes: of blocks that PyTorch cannot give back because something in them is in use.
    workspace_bytes: what the largest step takes while it runs. expected_graph_bytes: what was set aside for graphs.
    """

    free_before: int
    weights_bytes: int
    unused_bytes: int
    kv_bytes: int
    kv_tokens: int
    graph_bytes: int
    expected_graph_bytes: int
    workspace_bytes: int
    free_after: int

    def lines(self) -> list[str]:
        """One line an item. What nothing else accounts for was taken by kernels, libraries and small buffers."""
        named = self.weights_bytes + self.unused_bytes + self.kv_bytes + self.graph_bytes
        items = (
            ("weights", self.weights_bytes, ""),
            ("unused", self.unused_bytes, ", of blocks that are in use"),
            ("KV cache", self.kv_bytes, f", {self.kv_tokens:,} tokens"),
            ("graphs", self.graph_bytes, f", {self.expected_graph_bytes / _GIB:.2f} GiB were set aside"),
            ("other", self.free_before - self.free_after - named, ", kernels and libraries"),
            ("workspace", self.workspace_bytes, ", while the largest step runs"),
            ("free", self.free_after, ""),
        )
        head = f"memory of the device: {self.free_before / _GIB:.2f} GiB were free"
        return [head, *(f"  {name:10}{size / _GIB:8.2f} GiB{note}" for name, size, note in items)]
