"""Frames of a transfer connection, and the greetings by which both ends prove who they are. Pure functions.

A frame is the length of a msgpack record of `messages` (uint32), its XXH3-64 (uint64), both little-endian, and the
record. TCP's own sum lets one damaged segment in 65,536 pass, and a first token has no other guard. The bytes of pages
follow `Data` bare: their digests were announced.
A proof is an HMAC over both nonces and what both ends have said of themselves, so it holds for one connection, one
direction, one start of the worker and one layout.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from baleen_worker.transfer.messages import VERSION, Challenge, FromDecode, FromPrefill, Response, Welcome

LENGTH_BYTES = 4
DIGEST_BYTES = 8
MAX_FRAME_BYTES = 4 << 20
# Of a peer that has proven nothing yet.
MAX_GREETING_BYTES = 4096
NONCE_BYTES = 32

_encoder = msgspec.msgpack.Encoder()
_from_decode: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
_from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)


class StrangerError(Exception):
    """The peer is not one to exchange pages with; the message says why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What two ends must agree on. `secret` is empty where only this host can connect."""

    layout_id: str
    boot_epoch: int
    secret: bytes = b""
    dp_rank: int = 0


def encode(message: FromDecode | FromPrefill) -> bytes:
    """A frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + _digest(body) + body


def opened(sealed: bytes) -> bytes:
    """The record of a frame without its length. Raises ConnectionAbortedError when it was damaged on the way."""
    digest, body = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
    if digest != _digest(body):
        raise ConnectionAbortedError("a frame came damaged")
    return body


def _digest(body: bytes) -> bytes:
    return xxh3_64_intdigest(body).to_bytes(DIGEST_BYTES, "little")


def decode_from_decode(body: bytes) -> FromDecode:
    """A frame's record, from the decode side. Raises StrangerError."""
    try:
        return _from_decode.decode(body)
    except msgspec.DecodeError as error:
        raise StrangerError(f"it sends what is no message: {error}") from None


def decode_from_prefill(body: bytes) -> FromPrefill:
    """A frame's record, from the prefill side. Raises StrangerError."""
    try:
        return _from_prefill.decode(body)
    except msgspec.DecodeError as error:
        raise StrangerError(f"it sends what is no message: {error}") from None


def challenge(own: Identity) -> Challenge:
    """What the prefill side says first."""
    return Challenge(VERSION, own.boot_epoch, own.layout_id, secrets.token_bytes(NONCE_BYTES))


def respond(own: Identity, heard: Challenge, *, boot_epoch: int, dp_rank: int) -> Response:
    """The decode side's answer to the worker whose start is `boot_epoch`. Raises StrangerError for any other."""
    if heard.version != VERSION:
        raise StrangerError(f"it speaks version {heard.version} of transfers, not {VERSION}")
    if heard.boot_epoch != boot_epoch:
        raise StrangerError("the worker there has been started anew")
    if heard.layout_id != own.layout_id:
        raise StrangerError(f"its pages are laid out as {heard.layout_id}, not {own.layout_id}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Response(VERSION, own.layout_id, dp_rank, nonce, _proof(own.secret, b"decode", heard, nonce, dp_rank))


def welcome(own: Identity, said: Challenge, heard: Response) -> Welcome:
    """The prefill side's proof, when the peer's holds. Raises StrangerError."""
    if heard.version != VERSION:
        raise StrangerError(f"it speaks version {heard.version} of transfers, not {VERSION}")
    expected = _proof(own.secret, b"decode", said, heard.nonce, heard.dp_rank)
    if len(heard.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, heard.proof):
        raise StrangerError("it does not know the key")
    if heard.layout_id != own.layout_id:
        raise StrangerError(f"its pages are laid out as {heard.layout_id}, not {own.layout_id}")
    if heard.dp_rank != own.dp_rank:
        raise StrangerError(f"it asks for rank {heard.dp_rank}, and this is rank {own.dp_rank}")
    return Welcome(_proof(own.secret, b"prefill", said, heard.nonce, heard.dp_rank))


def check_welcome(own: Identity, heard: Challenge, said: Response, answer: Welcome) -> None:
    """Raises StrangerError when the prefill side does not know the key."""
    expected = _proof(own.secret, b"prefill", heard, said.nonce, said.dp_rank)
    if not hmac.compare_digest(expected, answer.proof):
        raise StrangerError("it does not know the key")


def _proof(secret: bytes, side: bytes, challenged: Challenge, nonce: bytes, dp_rank: int) -> bytes:
    said = _encoder.encode((side, challenged, nonce, dp_rank))
    return hmac.new(secret, said, hashlib.sha256).digest()
