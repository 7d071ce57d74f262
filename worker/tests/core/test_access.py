"""Who may call a worker: each listener, with and without the key, over real sockets."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from baleen_worker.command_line import parse
from baleen_worker.config import ConfigError
from baleen_worker.keys import bearer
from baleen_worker.pb import worker_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from worker_process import SERVICE, WorkerProcess, copy_model

KEY = b"not-to-be-guessed-by-anybody"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("access")
    (folder / "key").write_bytes(KEY + b"\n")
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(copy_model(folder), "--worker-key-file", str(folder / "key")) as worker:
        yield worker
        assert worker.process.poll() is None
        told = [line for line in worker.errors if "without the right key" in line]
        assert len(told) == 1, told


@pytest.fixture
def channel(worker: WorkerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(worker.address) as channel:
        yield channel


def get_info(channel: grpc.Channel, shown: list[tuple[str, str]]) -> pb.GetInfoResponse:
    call = channel.unary_unary(SERVICE + "GetInfo", pb.GetInfoRequest.SerializeToString, pb.GetInfoResponse.FromString)
    return call(pb.GetInfoRequest(), metadata=tuple(shown), timeout=10)


def test_the_digest_is_the_one_that_gateways_show() -> None:
    """The gateway's tests hold the same value (`worker/key.rs`): either side that drifts turns red."""
    assert bearer(b"0123456789abcdef") == "Bearer 027d4abafe19615f57df2a3c883c14dbe16b40326026778ec99e97096c6e6ca1"


def test_who_knows_the_key_is_answered(channel: grpc.Channel) -> None:
    assert get_info(channel, [("authorization", bearer(KEY))]).model_id == "whale"


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [("authorization", "")],
        [("authorization", bearer(KEY)[:-1])],
        [("authorization", bearer(KEY) + "0")],
        [("authorization", bearer(KEY + b"!"))],
        [("authorization", f"Bearer {KEY.decode()}")],
        [("authorization", bearer(KEY)), ("authorization", "Bearer x")],
        [("x-authorization", bearer(KEY))],
    ],
)
def test_who_does_not_is_refused(channel: grpc.Channel, shown: list[tuple[str, str]]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        get_info(channel, shown)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore[reportAttributeAccessIssue] - a call is an error too


def test_refused_calls_are_counted_where_prometheus_reads(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def num_refused() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = (line for line in lines if line.startswith("baleen_worker_refused_calls_total{"))
        return float(line.split()[-1])

    flags = ("--worker-key-file", str(folder / "key"), "--metrics-port", str(port))
    with WorkerProcess(copy_model(tmp_path), *flags) as worker, grpc.insecure_channel(worker.address) as channel:
        assert num_refused() == 0
        for shown in ([], [("authorization", "Bearer x")]):
            with pytest.raises(grpc.RpcError):
                get_info(channel, shown)
        assert get_info(channel, [("authorization", bearer(KEY))]).model_id == "whale"
        assert num_refused() == 2


def test_every_method_asks_for_it(channel: grpc.Channel) -> None:
    """A stream is refused before its first message, and whatever it would have said."""
    calls = {
        "GetTokenizer": lambda: list(channel.unary_stream(SERVICE + "GetTokenizer")(b"", timeout=10)),
        "FlushCache": lambda: channel.unary_unary(SERVICE + "FlushCache")(b"", timeout=10),
        "ProbeTransfer": lambda: channel.unary_unary(SERVICE + "ProbeTransfer")(b"", timeout=10),
        "Connect": lambda: list(channel.stream_stream(SERVICE + "Connect")(iter(()), timeout=10)),
        "reflection": lambda: list(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(  # pyright: ignore[reportCallIssue]
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            )
        ),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, name  # pyright: ignore[reportAttributeAccessIssue]


def test_health_is_told_to_everybody(channel: grpc.Channel) -> None:
    check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
    answer = check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--host 0.0.0.0", "--host 0.0.0.0"),
        ("--host ::", "--host ::"),
        ("--host 10.1.2.3", "--worker-key-file"),
        ("--host 10.1.2.3 --metrics-port 9000 --worker-key-file KEY", "--metrics-port 9000"),
        ('--kv-events-config {"endpoint":"tcp://*:5557"}', "endpoint tcp://*:5557"),
        ('--kv-events-config {"endpoint":"tcp://[::]:5557"}', "endpoint tcp://[::]:5557"),
        ('--kv-events-config {"endpoint":"ipc:///x","replay_endpoint":"tcp://0.0.0.0:1"}', "replay_endpoint"),
        ("--worker-key-file MISSING", "cannot be read"),
    ],
)
def test_a_listener_for_everybody_takes_a_word_from_the_operator(folder: Path, line: str, words: str) -> None:
    arguments = [str(folder), *line.replace("KEY", str(folder / "key")).replace("MISSING", str(folder / "no")).split()]
    with pytest.raises(ConfigError, match=words.replace("*", r"\*").replace("[", r"\[")):
        parse(arguments)
    if "MISSING" not in line:
        parse([*arguments, "--insecure-listen"])


@pytest.mark.parametrize(
    "line",
    [
        "--host 127.0.0.1 --metrics-port 9000",
        "--host ::1",
        "--host localhost",
        "--host 10.1.2.3 --worker-key-file KEY",
        '--kv-events-config {"endpoint":"tcp://10.1.2.3:5557"}',
        '--kv-events-config {"endpoint":"ipc:///x","replay_endpoint":"tcp://127.0.0.1:1"}',
        '--kv-events-config {"endpoint":"tcp://*:5557","publisher":"null"}',
    ],
)
def test_a_listener_for_this_machine_or_with_a_key_does_not(folder: Path, line: str) -> None:
    parse([str(folder), *line.replace("KEY", str(folder / "key")).split()])
