"""Backends of latent attention that need hardware or libraries we have not run: named, described, refused.

A call is written when it can be run. Until then a row here keeps the names that users of other engines know from being
unknown ones, and says where such a backend would belong.
"""

from __future__ import annotations

from typing import Any, NoReturn

from baleen_kernels import mla_slots
from baleen_kernels.machine import CDNA, Needs
from baleen_kernels.registry import Backend, Op

BLACKWELL = ("sm100", "sm103")
_UNWRITTEN = "its call has not been written, because nobody has run it yet"
_TRTLLM = Needs(archs=BLACKWELL, arch_note="a Blackwell GPU", packages=("flashinfer",), unwritten=_UNWRITTEN)
_AITER = Needs(archs=CDNA, arch_note="an AMD Instinct GPU", packages=("aiter",), unwritten=_UNWRITTEN)
_NPU = Needs(archs=("npu",), arch_note="an Ascend NPU", packages=("torch_npu",), unwritten=_UNWRITTEN)

ROWS = (
    (mla_slots.OP, "trtllm", _TRTLLM),
    (mla_slots.OP, "aiter", _AITER),
    (mla_slots.OP, "npu", _NPU),
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(f"this backend cannot be used: {_UNWRITTEN}")


def _add(op: Op[Any], name: str, needs: Needs) -> None:
    op.backends[name] = Backend(name, _refuse, needs, lambda **_: _UNWRITTEN)


for _row in ROWS:
    _add(*_row)
