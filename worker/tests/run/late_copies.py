"""The host tier's copies as late as a device may make them: a layer's when somebody waits for it, and not before.

On a CPU a copy is done when it is asked for, so nobody who forgets to wait is found out. Here whoever reads a layer
without waiting reads what was there before, which is poison, and whoever writes one spoils what was to go out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from baleen_worker.cache import host_pool
from baleen_worker.cache.host_pool import HostPool

# pyright: reportPrivateUsage=false


class LateHostPool(HostPool):
    """A `HostPool` on a CPU whose copies are those of a stream far behind."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """See `HostPool`."""
        super().__init__(*arguments, **options)
        self._late: deque[tuple[Any, ...]] = deque()  # of the layers that are still to be copied

    def wait(self, layer: int) -> None:
        """Makes the copies of the layer, and of all before it."""
        while len(self._layers) - len(self._late) <= layer:
            host_pool._copy_layer(*self._late.popleft())

    def _begin(self, out: Sequence[host_pool._Run], back: Sequence[host_pool._Run]) -> None:
        self.wait(len(self._layers) - 1)  # a stream keeps the order
        self._late.extend((stores, kept, out, back) for stores, kept in zip(self._layers, self._host, strict=True))
