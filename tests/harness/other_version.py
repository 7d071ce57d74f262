"""A worker of another minor version of the contract: python -m harness.other_version newer|older MODEL_DIR ...

The same command line and the same code as `python -m baleen_worker`; what goes over the wire differs as the contract
says that it may between versions with one number. A newer worker adds fields and features that nobody else knows. An
older one has none of the optional features, and its gateway sends fields that it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import grpc
from baleen_worker import __main__ as entry
from baleen_worker.pb import worker_pb2 as pb

_VARINT, _FIXED64, _BYTES = 0, 1, 2

Serialize = Callable[[Any], bytes]


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# One field of each kind, under numbers that the contract has not given.
UNKNOWN = _tag(1000, _VARINT) + _varint(123_456) + _tag(1001, _FIXED64) + bytes(8) + _tag(1002, _BYTES) + b"\x06future"


def newer(message: Any) -> bytes:
    """The message with more in it than this version knows, in its parts as well: parts that come twice are merged."""
    if isinstance(message, pb.GetInfoResponse):
        message = pb.GetInfoResponse.FromString(message.SerializeToString())
        message.features.append("teleportation")
        message.worker_version = "99.0.0"
    data = message.SerializeToString()
    for field, value in message.ListFields():
        if field.message_type is not None and not isinstance(value, (list, tuple)) and hasattr(value, "ListFields"):
            data += _tag(field.number, _BYTES) + _varint(len(UNKNOWN)) + UNKNOWN
    return data + UNKNOWN


def older(message: Any) -> bytes:
    """The message without what is optional."""
    if isinstance(message, pb.GetInfoResponse):
        message = pb.GetInfoResponse.FromString(message.SerializeToString())
        del message.features[:]
        message.worker_version = "0.0.1"
        message.ClearField("dtype")
        message.ClearField("device")
    return message.SerializeToString()


def speak(serialize: Serialize) -> None:
    """Has every handler that is made from now on speak so, and hear of fields that it does not know."""
    for name in ("unary_unary", "unary_stream", "stream_stream"):
        make = getattr(grpc, f"{name}_rpc_method_handler")

        def make_other(behaviour: Any, *codecs: Any, make: Callable[..., Any] = make, **named: Any) -> Any:
            if named:  # services that come with grpc, for health and reflection
                return make(behaviour, **named)
            deserialize, _ = codecs
            return make(behaviour, lambda data: deserialize(data + UNKNOWN), serialize)

        setattr(grpc, f"{name}_rpc_method_handler", make_other)


if __name__ == "__main__":
    speak({"newer": newer, "older": older}[sys.argv.pop(1)])
    sys.exit(entry.main())
