"""DeepGEMM: what it needs, and how it is loaded.

Its kernels wait for the one before them before they read anything, so they may be placed on the device while that one
ends (programmatic dependent launch, its `set_pdl`): 0.3 to 0.5 % of a decode step of 64 rows on an H200.
"""

from __future__ import annotations

import functools
from typing import Any

from baleen_kernels.machine import HOPPER, Needs

NEEDS = Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("deep_gemm",), tools=("nvcc",))


@functools.cache
def load() -> Any:
    """The module; its launches are as above from then on, in the whole process. ImportError where it is missing."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    deep_gemm.set_pdl(True)
    return deep_gemm
