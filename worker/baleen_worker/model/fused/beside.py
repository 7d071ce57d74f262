"""Work that runs beside what follows it, on a stream of its own, so that small kernels do not wait for one another.

What runs beside reads tensors that its caller keeps until it has joined, and its results are used only afterwards; so
memory is never handed out again while one of the streams still reads it. A graph that is being captured takes both
streams in. On a CPU work runs where it is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

# Tokens of a step up to which its kernels leave much of a device free. A graph of one stream also follows the one
# before it sooner: after 4.5 us where forks make it 13.8. At 128 tokens forks gain 0.3 %, for which the device would be
# idle three times as long between two steps.
_MOST_TOKENS = 64


class Pending(Generic[R]):
    """Work that was started. `join` must be called before its inputs are dropped or its result is used."""

    def __init__(self, result: R, stream: torch.cuda.Stream | None) -> None:
        self._result, self._stream = result, stream

    def join(self) -> R:
        """The result, which the caller's stream waits for."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._result


class Fork:
    """A point in the work of the caller's stream, after which work may begin that runs beside what follows it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def start(self, work: Callable[[], R]) -> Pending[R]:
        """Starts at that point, whatever the caller's stream has been given since."""
        if self._stream is None:
            return Pending(work(), None)
        with torch.cuda.stream(self._stream):
            return Pending(work(), self._stream)


class Beside:
    """One stream of a model, on which one piece of work runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self, *, num_tokens: int) -> Fork:
        """After what the caller's stream has been given. Work of steps of many tokens runs on the caller's stream."""
        if self._stream is None or num_tokens > _MOST_TOKENS:
            return Fork(None)
        self._stream.wait_stream(torch.cuda.current_stream())
        return Fork(self._stream)

    def start(self, work: Callable[[], R], *, num_tokens: int) -> Pending[R]:
        """Forks, and starts there."""
        return self.fork(num_tokens=num_tokens).start(work)
