"""Flags of a worker that serves one half of requests, and what they become."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baleen_worker.config import ConfigError, DisaggregationConfig
from baleen_worker.flag_values import host_and_port, integer, number
from baleen_worker.keys import read_key
from baleen_worker.transfer.lending import Backend

if TYPE_CHECKING:
    import argparse

KEY_FLAG = "--disaggregation-key-file"
_MODES = ("null", "prefill", "decode")
_BACKENDS = tuple(backend.value for backend in Backend)
# Libraries that are refused, and why: docs/adr/0028.
_REFUSED = {"mooncake": "its listeners are open to everybody, whatever address it is given"}
_OF_BOTH = (
    "disaggregation_transfer_backend",
    "disaggregation_ib_device",
    "disaggregation_key_file",
    "disaggregation_progress_s",
    "disaggregation_lease_s",
)
_OF_PREFILL = ("disaggregation_bootstrap_port", "disaggregation_host", "disaggregation_advertise_address")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument_group("prefill/decode disaggregation").add_argument
    add(
        "--disaggregation-mode",
        choices=_MODES,
        default="null",
        help="prefill: compute prompts for decode workers; decode: generate from them (default: both, alone)",
    )
    add(
        "--disaggregation-transfer-backend",
        choices=(*_BACKENDS, *_REFUSED),
        metavar="{" + ",".join(_BACKENDS) + "}",
        help="how pages travel: over tcp (default), or by cuda_ipc from one GPU to another of this host, "
        "or by nixl (pip install nixl-cu13==1.5.1); auto: by cuda_ipc where that is possible",
    )
    add(
        "--disaggregation-ib-device",
        metavar="NAMES",
        help="cards or networks that nixl may use, separated by commas, such as mlx5_0 or eth0: it asks for no key "
        "there, so whoever reaches them must be trusted (default lo, this host)",
    )
    add(
        "--disaggregation-bootstrap-port",
        type=integer(0, 65535),
        metavar="PORT",
        help="where a prefill worker serves pages, 0 for a free port (default 8998)",
    )
    add("--disaggregation-host", metavar="ADDRESS", help="address of that port on this machine (default --host)")
    add(
        "--disaggregation-advertise-address",
        type=host_and_port,
        metavar="HOST:PORT",
        help="where decode workers reach that port, if address translation or a proxy is between (default: there)",
    )
    add(
        "--disaggregation-key-file",
        type=Path,
        metavar="FILE",
        help="a secret that prefill and decode workers share; needed beyond this host",
    )
    add(
        "--disaggregation-progress-s",
        type=number(0.1, 3600.0),
        metavar="SECONDS",
        help="how long a decode worker waits for a silent prefill worker (default 10)",
    )
    add(
        "--disaggregation-lease-s",
        type=number(0.1, 3600.0),
        metavar="SECONDS",
        help="how long a prefill worker holds pages for a silent decode worker (default 30)",
    )


def chosen(values: dict[str, Any]) -> DisaggregationConfig | None:
    """What the flags ask for; None for a worker that serves whole requests. Raises ConfigError."""
    mode = values["disaggregation_mode"]
    _refuse_idle(values, mode)
    if mode == "null":
        return None
    if mode == "decode" and values["enable_hierarchical_cache"]:
        raise ConfigError(
            "--enable-hierarchical-cache cannot be honoured with --disaggregation-mode decode, whose pages are filled "
            "between steps: leave one of them out"
        )
    host = values["disaggregation_host"] or values["host"]
    key_file: Path | None = values["disaggregation_key_file"]
    if key_file is None and values["worker_key_file"] is not None:
        key_file = Path(values["worker_key_file"])  # one secret may serve both
    if key_file is not None:
        read_key(key_file, KEY_FLAG)
    if mode == "prefill":
        _check_host(host, key_file, is_advertised=values["disaggregation_advertise_address"] is not None)
    given = {
        "port": values["disaggregation_bootstrap_port"],
        "progress_s": values["disaggregation_progress_s"],
        "lease_s": values["disaggregation_lease_s"],
        "advertised": values["disaggregation_advertise_address"],
        "backend": _backend(values),
        "devices": _devices(values),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return DisaggregationConfig(prefills=mode == "prefill", host=host, key_file=key_file, **given)


def _backend(values: dict[str, Any]) -> Backend | None:
    name = values["disaggregation_transfer_backend"]
    if name in _REFUSED:
        raise ConfigError(f"--disaggregation-transfer-backend {name} is refused: {_REFUSED[name]}. Name tcp or nixl")
    if name == Backend.CUDA_IPC.value and (values["runner"] == "fake" or values["device"] == "cpu"):
        raise ConfigError(
            "--disaggregation-transfer-backend cuda_ipc moves pages between GPUs, and this worker's are in host "
            "memory: name tcp, or auto"
        )
    return None if name is None else Backend(name)


def _devices(values: dict[str, Any]) -> str | None:
    names: str | None = values["disaggregation_ib_device"]
    if names is not None and values["disaggregation_transfer_backend"] != Backend.NIXL.value:
        raise ConfigError(
            "--disaggregation-ib-device has no effect without --disaggregation-transfer-backend nixl: add that, or "
            "leave it out"
        )
    if names is not None and not all(name.strip() for name in names.split(",")):
        raise ConfigError(f"--disaggregation-ib-device {names!r} has an empty name in it: separate names by one comma")
    return names


def _refuse_idle(values: dict[str, Any], mode: str) -> None:
    idle = {"null": _OF_BOTH + _OF_PREFILL, "decode": _OF_PREFILL, "prefill": ()}[mode]
    name = next((name for name in idle if values[name] is not None), None)
    if name is None:
        return
    flag = f"--{name.replace('_', '-')}"
    needed = "prefill" if name in _OF_PREFILL else "prefill or decode"
    raise ConfigError(f"{flag} has no effect without --disaggregation-mode {needed}: add that, or leave it out")


def _check_host(host: str, key_file: Path | None, *, is_advertised: bool) -> None:
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, 0)[0][4][0])
    except OSError:
        raise ConfigError(f"--disaggregation-host {host} is no address of this machine: name one") from None
    if address.is_unspecified and not is_advertised:
        raise ConfigError(
            f"pages are served on {host}, which is nothing that decode workers could be told to connect to: "
            "name one address of this machine with --disaggregation-host, or the one that decode workers reach with "
            "--disaggregation-advertise-address"
        )
    if not address.is_loopback and key_file is None:
        raise ConfigError(
            f"pages would be served on {host} to everybody: give both sides a secret with --worker-key-file or "
            "--disaggregation-key-file, or serve them on 127.0.0.1"
        )
