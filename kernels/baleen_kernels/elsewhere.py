"""Backends of `mla_slots` that need hardware or libraries we have not run: named, described, refused with a sentence.

A call is written when it can be run. Until then a row here keeps the names that users of other engines know from being
unknown ones, and says where such a backend would belong.
"""

from __future__ import annotations

from typing import Any, NoReturn

from baleen_kernels.machine import CDNA, HOPPER, NVIDIA, Needs
from baleen_kernels.mla_slots import OP
from baleen_kernels.registry import Backend

BLACKWELL = ("sm100", "sm103")
_UNWRITTEN = "its call has not been written, because nobody has run it yet"

ROWS = {
    "fa3": Needs(archs=HOPPER, arch_note="a Hopper GPU", packages=("vllm_flash_attn",), unwritten=_UNWRITTEN),
    "tilelang": Needs(archs=NVIDIA, arch_note="an NVIDIA GPU", packages=("tilelang",), unwritten=_UNWRITTEN),
    "trtllm": Needs(archs=BLACKWELL, arch_note="a Blackwell GPU", packages=("flashinfer",), unwritten=_UNWRITTEN),
    "aiter": Needs(archs=CDNA, arch_note="an AMD Instinct GPU", packages=("aiter",), unwritten=_UNWRITTEN),
    "npu": Needs(archs=("npu",), arch_note="an Ascend NPU", packages=("torch_npu",), unwritten=_UNWRITTEN),
}


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(f"this backend of 'mla_slots' cannot be used: {_UNWRITTEN}")


for _name, _needs in ROWS.items():
    OP.backends[_name] = Backend(_name, _refuse, _needs, lambda **_: _UNWRITTEN)
