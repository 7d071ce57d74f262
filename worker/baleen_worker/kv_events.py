"""Publishes what the prefix cache holds to routers that listen over ZMQ, in the msgpack format of vLLM and SGLang.

A batch of events a step: `[unix seconds, [event, …], rank]`, each event an array that begins with its name; it goes out
as (topic, 8 bytes of big-endian sequence number, batch). A subscriber that missed batches asks the replay socket, a
ROUTER, with the first number it wants, and gets those that are still kept, then number -1. That format calls a page a
block. The contract's own stream carries the same events, see `to_contract`; this is for routers that speak no gRPC.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from baleen_worker.cache.events import CacheEvent, PagesCleared, PagesRemoved, PagesStored
from baleen_worker.pb import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baleen_worker.config import KvEventsConfig

_MEDIA = ("GPU", "CPU_PINNED")  # the tier that requests compute from, whatever the device is, and host memory
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_RANK = 0


class KvEventPublisher:
    """Both sockets. Raises ValueError when an address cannot be used."""

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        self._topic = config.topic.encode()
        self._page_size = page_size
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = 0
        self._context = zmq.asyncio.Context()
        self._publisher = self._open(zmq.PUB, config.endpoint, config.hwm, binds=config.binds_endpoint)
        self._replays = None
        if config.replay_endpoint is not None:
            self._replays = self._open(zmq.ROUTER, config.replay_endpoint, config.hwm, binds=True)

    async def publish(self, events: Sequence[CacheEvent]) -> None:
        """Sends the events of one step as one batch; never waits for a subscriber."""
        batch = [time.time(), [to_array(event, self._page_size) for event in events], _RANK]
        number, payload = self._num_sent.to_bytes(8, "big"), self._encoder.encode(batch)
        self._num_sent += 1
        self._kept.append((number, payload))
        await self._publisher.send_multipart((self._topic, number, payload))

    async def serve_replays(self) -> None:
        """Answers who has missed something; runs until cancelled."""
        if self._replays is None:
            return
        while True:
            request = await self._replays.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:  # not of this protocol
                continue
            client, first = request[0], request[2]
            for number, payload in list(self._kept):
                if number >= first:
                    await self._replays.send_multipart((client, b"", number, payload))
            await self._replays.send_multipart((client, b"", _END_OF_REPLAY, b""))

    def close(self) -> None:
        """Gives the sockets back; what was sent a moment ago may be lost."""
        self._context.destroy(linger=0)

    def _open(self, kind: int, endpoint: str, hwm: int, *, binds: bool) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, hwm)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"--kv-events-config: cannot use {endpoint}: {error.strerror}") from None
        return socket


def to_array(event: CacheEvent, page_size: int) -> list[Any]:
    """An event as the format spells it; absent fields of LoRA are null."""
    match event:
        case PagesStored(page_hashes, parent_hash, _, on_host):
            return ["BlockStored", page_hashes, parent_hash, event.token_ids, page_size, None, _MEDIA[on_host]]
        case PagesRemoved(page_hashes, on_host):
            return ["BlockRemoved", page_hashes, _MEDIA[on_host]]
        case PagesCleared():
            return ["AllBlocksCleared"]


def to_contract(events: Sequence[CacheEvent], first_id: int, page_size: int) -> list[pb.KvEvent]:
    """Events as the contract spells them, numbered from `first_id`. It tells of pages on the device only."""
    messages: list[pb.KvEvent] = []
    on_device = [event for event in events if isinstance(event, PagesCleared) or not event.on_host]
    for event_id, event in enumerate(on_device, first_id):
        message = pb.KvEvent(event_id=event_id, dp_rank=_RANK)
        match event:
            case PagesStored(page_hashes):
                message.stored.page_hashes.extend(page_hashes)
                message.stored.page_size_tokens = page_size
            case PagesRemoved(page_hashes):
                message.removed.page_hashes.extend(page_hashes)
            case PagesCleared():
                message.cleared.SetInParent()
        messages.append(message)
    return messages
