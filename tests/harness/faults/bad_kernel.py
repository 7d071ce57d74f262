"""A kernel that writes where nothing is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write(address: tl.int64):  # noqa: ANN201  # pyright: ignore[reportInvalidTypeForm]  # its type in the kernel
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)
