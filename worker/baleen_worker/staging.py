"""Copies between host and device that nobody waits for, and what to make of a device that failed meanwhile.

A copy from ordinary memory makes the host wait until the device has done all that was asked of it before; one from
page-locked memory does not. PyTorch keeps such memory for reuse and knows when a copy out of it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baleen_worker.step import DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of the values on the device; on a CPU it may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def list_to_device(
    values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values on the device: [n], or [n, m] of n tuples."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Results on their way to the host. Asked for while they are being computed, read after `wait`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = None if device.type == "cpu" else torch.cuda.Event()

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor on the host; its contents hold after `wait`."""
        if self._event is None:
            return tensor.clone()
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return target.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """No more is taken."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until all that was taken is there; does not wait for what was asked of the device afterwards."""
        if self._event is not None:
            self._event.synchronize()


def raise_if_lost(device: torch.device, error: Exception) -> None:
    """DeviceLostError where an error was one that a CUDA device does not recover from, such as an illegal access.

    Every kernel library has errors of its own for that, so the device is asked.
    """
    if device.type == "cpu":
        return
    try:
        torch.cuda.synchronize(device)
    except torch.AcceleratorError:
        raise DeviceLostError(" ".join(str(error).split())) from error
