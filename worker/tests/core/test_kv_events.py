"""What routers hear of the prefix cache: over ZMQ in the format of vLLM and SGLang, and on the contract's stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from baleen_worker.cache.events import CacheEvent, PagesCleared, PagesRemoved, PagesStored
from baleen_worker.cache.prefix import page_keys
from baleen_worker.command_line import parse
from baleen_worker.config import ConfigError, KvEventsConfig
from baleen_worker.kv_events import KvEventPublisher, to_contract

EVENTS: list[list[CacheEvent]] = [
    [PagesStored([2**64 - 1, 7], None, bytearray(page_keys(range(128))))],
    [PagesStored([9], 7, bytearray(page_keys(range(64)))), PagesRemoved([9, 7])],
    [PagesCleared()],
]
ON_THE_WIRE: list[list[Any]] = [
    [["BlockStored", [2**64 - 1, 7], None, list(range(128)), 64, None, "GPU"]],
    [["BlockStored", [9], 7, list(range(64)), 64, None, "GPU"], ["BlockRemoved", [9, 7], "GPU"]],
    [["AllBlocksCleared"]],
]


def test_a_subscriber_gets_batches_and_a_late_one_their_replay(tmp_path: Path) -> None:
    config = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv", buffer_steps=2
    )

    async def talk() -> None:
        publisher = KvEventPublisher(config, page_size=64)
        replays = asyncio.create_task(publisher.serve_replays())
        with zmq.asyncio.Context() as context:
            subscriber, request = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            subscriber.subscribe(b"kv")
            subscriber.connect(config.endpoint)
            request.connect(f"ipc://{tmp_path}/replay")
            while not await subscriber.poll(50):  # until the subscription has arrived
                await publisher.publish([PagesCleared()])
            _, first, _ = await subscriber.recv_multipart()
            while await subscriber.poll(50):
                _, first, _ = await subscriber.recv_multipart()
            for number, events in enumerate(EVENTS, int.from_bytes(first, "big") + 1):
                await publisher.publish(events)
                topic, sequence, payload = await subscriber.recv_multipart()
                seconds, batch, rank = msgspec.msgpack.decode(payload)
                assert (topic, int.from_bytes(sequence, "big"), rank) == (b"kv", number, 0)
                assert isinstance(seconds, float)
                assert batch == ON_THE_WIRE[number - int.from_bytes(first, "big") - 1]

            await request.send_multipart((b"", bytes(8)))
            replayed = [await request.recv_multipart() for _ in range(3)]
            assert [msgspec.msgpack.decode(payload)[1] for _, _, payload in replayed[:2]] == ON_THE_WIRE[-2:]
            assert replayed[2] == [b"", b"\xff" * 8, b""]
            subscriber.close()
            request.close(linger=0)
        replays.cancel()
        publisher.close()

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_the_contract_carries_the_same_events_numbered() -> None:
    messages = to_contract([event for events in EVENTS for event in events], 5, 64)
    assert [(message.event_id, message.WhichOneof("event")) for message in messages] == [
        (5, "stored"),
        (6, "stored"),
        (7, "removed"),
        (8, "cleared"),
    ]
    assert (list(messages[1].stored.page_hashes), messages[1].stored.page_size_tokens) == ([9], 64)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"publisher": "kafka"}', "use zmq or null"),
        ('{"end_point": "tcp://*:1"}', "end_point"),
        ("zmq", "malformed"),
        ('{"hwm": 0}', "at least 1"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse([str(tmp_path), "--kv-events-config", given])


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    given = json.dumps({"endpoint": f"ipc://{tmp_path}/no/such/folder"})
    config = parse([str(tmp_path), "--kv-events-config", given]).head.kv_events
    assert config is not None

    async def open_it() -> None:
        with pytest.raises(ValueError, match="cannot use ipc"):
            KvEventPublisher(config, 64)

    asyncio.run(open_it())
