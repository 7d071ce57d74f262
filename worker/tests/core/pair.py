"""Two real workers that serve one request together, and a gateway's end of both, for tests over real sockets."""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any, Self

from baleen_worker.pb import worker_pb2 as pb
from worker_process import Client, GatewayStream, WorkerProcess, make_submit


class Side:
    """One worker, its client and a stream."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.client = Client(process.address)
        self.info = self.client.info()
        self.stream: GatewayStream = self.client.connect()


class Pair:
    """A prefill and a decode worker. Requests go to both, as a gateway would send them."""

    def __init__(self, prefill: WorkerProcess, decode: WorkerProcess) -> None:
        self.prefill, self.decode = Side(prefill), Side(decode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for side in (self.prefill, self.decode):
            side.client.channel.close()

    def submits(self, key: int, prompt: list[int], max_tokens: int, **fields: Any) -> tuple[pb.Submit, pb.Submit]:
        """Both legs of a request. `fields` that are none of Submit's are Sampling's."""
        given = {name: fields.pop(name) for name in list(fields) if name in pb.Submit.DESCRIPTOR.fields_by_name}
        legs: list[pb.Submit] = []
        of_submit: dict[str, Any] = {"request_id": secrets.token_bytes(16)} | given
        for role in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
            submit = make_submit(key, prompt, max_tokens, **({"seed": key} | fields))
            submit.disaggregation.role = role
            submit.MergeFrom(pb.Submit(**of_submit))
            legs.append(submit)
        legs[1].disaggregation.peer.CopyFrom(self.prefill.info.transfer_endpoints[0])
        legs[1].disaggregation.peer_boot_epoch = self.prefill.info.boot_epoch
        return legs[0], legs[1]

    def ask(self, key: int, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """Submits both legs."""
        prefill, decode = self.submits(key, prompt, max_tokens, **fields)
        self.prefill.stream.send(submits=[prefill])
        self.decode.stream.send(submits=[decode])

    def finish(self, *keys: int) -> None:
        """Reads until both legs of all of them have ended."""
        for side in (self.decode, self.prefill):
            side.stream.read_until(lambda stream=side.stream: {*keys} <= stream.ended)
