"""Converters of flag values, for argparse: each takes the text and returns the value, or says why it cannot be one."""

from __future__ import annotations

import argparse
import json
from typing import Any

from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS


def named_place(text: str) -> tuple[str, str]:
    name, _, place = text.partition("=")
    module, _, attribute = place.partition(":")
    if not (name and module and attribute):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=MODULE:ATTRIBUTE")
    return name, place


def integer(minimum: int, maximum: int | None = None) -> Any:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{value} is out of range: it must be {bounds}")
        return value

    return convert


def host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare_ipv6 or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HOST:PORT")
    return text


def json_object(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return text


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must lie between 0 and 1")
    return value


def number(minimum: float, maximum: float) -> Any:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be from {minimum:g} to {maximum:g}")
        return value

    return convert


def chunked_prefill_size(text: str) -> int:
    value = integer(-1)(text)
    if value != -1 and (value == 0 or value % PAGE_SIZE_TOKENS != 0):
        raise argparse.ArgumentTypeError(
            f"{value} is not a multiple of the page size: give a positive multiple of {PAGE_SIZE_TOKENS}, or -1"
        )
    return value


def kv_cache_dtype(text: str) -> str:
    return {"bf16": "bfloat16", "fp32": "float32", "fp8": "fp8_e4m3"}.get(text, text)
