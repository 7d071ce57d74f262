"""What a device's memory went to, for the operator. Owns no measurement."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """All in bytes but `kv_tokens`, which is how many tokens the pages hold.

    free_before, free_after: of the device, before anything was loaded and when all is in place. workspace_bytes: what
    the largest step takes while it runs.
    """

    free_before: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int
    graph_bytes: int
    workspace_bytes: int
    free_after: int

    def lines(self) -> list[str]:
        """One line an item."""
        items = (
            ("weights", self.weights_bytes, ""),
            ("KV cache", self.kv_bytes, f", {self.kv_tokens:,} tokens"),
            ("graphs", self.graph_bytes, ""),
            ("workspace", self.workspace_bytes, ", while the largest step runs"),
            ("free", self.free_after, ""),
        )
        head = f"memory of the device: {self.free_before / _GIB:.2f} GiB were free"
        return [head, *(f"  {name:10}{size / _GIB:8.2f} GiB{note}" for name, size, note in items)]
