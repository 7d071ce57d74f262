"""Columns of numbers that travel between processes as their bytes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Column = array[int]
else:
    Column = array  # cannot be subscripted before Python 3.12


def pack(value: object) -> bytes:
    """What msgspec is to write for a column: the code of its items, then the items. For `enc_hook`.

    NotImplementedError is how msgspec's contract for that hook says that a type cannot be written.
    """
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} is in no message")


def unpack(kind: type, data: object) -> Column:
    """Inverse of `pack`, for `dec_hook`."""
    assert isinstance(data, bytes), f"a column came as {type(data).__name__}, not {kind.__name__}"
    return array(chr(data[0]), data[1:])
