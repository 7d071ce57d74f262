"""Who may call a worker: the check of the key that it shares with its gateways, and the listeners that need one."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any

import grpc

from baleen_worker.config import ConfigError, HeadConfig, KvEventsConfig
from baleen_worker.keys import bearer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_METADATA = "authorization"
# Says whether the worker is up and nothing else; those who ask, kubelets for example, have no key to show.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_REFUSAL = "this worker answers those alone who share its key: give the gateway the same file by --worker-key-file"

logger = logging.getLogger(__name__)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Ends every call without the key with UNAUTHENTICATED, before anything of it is read."""

    def __init__(self, key: bytes) -> None:
        self._expected = bearer(key).encode()
        self.num_refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's own handler, or one of the same shape that refuses."""
        handler = await continuation(handler_call_details)
        is_open = handler_call_details.method.startswith(_OPEN_SERVICE)
        if handler is None or is_open or self._is_shown(handler_call_details.invocation_metadata):
            return handler
        return self._refusing(handler)

    def _is_shown(self, metadata: Any) -> bool:
        shown = [value for name, value in metadata or () if name == _METADATA]
        return len(shown) == 1 and hmac.compare_digest(str(shown[0]).encode(), self._expected)

    def _refusing(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning("a call of %s without the right key is refused; more are not told", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

        shapes = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        shape = shapes[bool(handler.request_streaming), bool(handler.response_streaming)]
        return shape(refuse, handler.request_deserializer, handler.response_serializer)


def check_listeners(head: HeadConfig, *, insecure: bool) -> None:
    """Refuses a listener that strangers could reach and that asks for no key. Raises ConfigError."""
    if insecure:
        return
    if not is_loopback(head.host):
        if head.key_file is None:
            raise ConfigError(
                f"--host {head.host} would let everybody who reaches it use this worker: share a key with the gateway "
                "by --worker-key-file, or say --insecure-listen where the network keeps strangers away"
            )
        if head.metrics_port is not None:
            raise ConfigError(
                f"--metrics-port {head.metrics_port} of --host {head.host} would tell everybody who reaches it and "
                "asks for no key: say --insecure-listen where the network keeps strangers away, or leave it out"
            )
    for name, endpoint in _event_listeners(head.kv_events):
        if not _is_local_endpoint(endpoint):
            raise ConfigError(
                f"--kv-events-config: {name} {endpoint} would tell everybody who reaches it and asks for no key: "
                "say --insecure-listen where the network keeps strangers away, or name an ipc:// address"
            )


def is_loopback(host: str) -> bool:
    """Whether none but this machine reaches a listener on `host`. A name that is unknown is nobody's yet."""
    try:
        addresses = [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(host, 0)]
    except (OSError, UnicodeError):
        return True
    return all(address.is_loopback for address in addresses)


def _event_listeners(kv_events: KvEventsConfig | None) -> list[tuple[str, str]]:
    """Addresses that are listened on; an endpoint without a wildcard is connected to."""
    if kv_events is None or not kv_events.enabled:
        return []
    listeners = [("endpoint", kv_events.endpoint)] if kv_events.binds_endpoint else []
    if kv_events.replay_endpoint is not None:
        listeners.append(("replay_endpoint", kv_events.replay_endpoint))
    return listeners


def _is_local_endpoint(endpoint: str) -> bool:
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    return host != "*" and is_loopback(host)
