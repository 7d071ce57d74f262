"""A real worker over a real socket: the contract's streams, bad submits, isolation, and every way to end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from baleen_worker.pb import worker_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from worker_process import (
    Client,
    WorkerProcess,
    answer_to,
    copy_model,
    gone,
    make_submit,
    page_names,
    rows,
    wait_until,
)

POISON = 2000
SLOW_STEP = ("--fake-step-ms", "5")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(model_dir: Path) -> Iterator[WorkerProcess]:
    """One worker for the tests that leave it as they found it."""
    with WorkerProcess(model_dir, "--fake-poison-token-id", str(POISON), *SLOW_STEP) as process:
        yield process
        assert process.process.poll() is None, "a test ended the shared worker"


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client(worker.address) as client:
        yield client


# --- what the worker says about itself ---------------------------------------------------------------------------


def test_get_info_and_the_ready_event_agree(worker: WorkerProcess, client: Client, model_dir: Path) -> None:
    info, ready = client.info(), worker.event("ready")
    assert info.protocol_version == 1
    assert info.boot_epoch != 0
    assert info.model_id == "whale"
    assert info.model_type == "deepseek_v32"
    assert info.role == pb.ROLE_UNIFIED
    assert info.config_digest == hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()
    assert info.tokenizer_sha256 == hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    topology = info.topology
    assert (topology.tp_size, topology.dp_size, topology.ep_size, topology.pp_size, topology.num_nodes) == (1,) * 5
    for field in ("device", "dtype", "capacity_pages", "page_size_tokens", "context_length_tokens"):
        assert ready[field] == getattr(info, field)
    assert worker.events[0]["event"] == "listening"
    assert worker.stray == []


def test_get_tokenizer_streams_the_model_folders_files(client: Client, model_dir: Path) -> None:
    names = {
        pb.TOKENIZER_FILE_TOKENIZER: "tokenizer.json",
        pb.TOKENIZER_FILE_TOKENIZER_CONFIG: "tokenizer_config.json",
        pb.TOKENIZER_FILE_MODEL_CONFIG: "config.json",
    }
    assert client.files() == {kind: (model_dir / name).read_bytes() for kind, name in names.items()}


def test_health_and_reflection_are_served(client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "baleen.worker.v1.Worker"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))  # pyright: ignore[reportAttributeAccessIssue]
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    services = ProtoReflectionDescriptorDatabase(client.channel).get_services()
    assert {"baleen.worker.v1.Worker", "grpc.health.v1.Health"} <= set(services)


# --- streams -----------------------------------------------------------------------------------------------------


def test_tokens_stream_in_order_and_end_once(client: Client) -> None:
    info, stream = client.info(), client.connect()
    prompts = {key: [key % 97 + 1] * (key * 7 % 200 + 1) for key in range(1, 65)}
    stream.send(submits=[make_submit(key, prompt, 20 + key) for key, prompt in prompts.items()])
    stream.read_until(lambda: len(stream.ended) == 64)
    for key, prompt in prompts.items():
        assert stream.tokens[key] == answer_to(info, prompt, 20 + key)
    assert set(stream.ends.values()) == {"LENGTH"}
    assert (stream.load.running_requests, stream.load.used_pages) == (0, 0)


def test_a_frame_carries_every_request_that_moved_in_a_step(client: Client) -> None:
    stream = client.connect()
    stream.send(submits=[make_submit(key, [3, 4], 30) for key in range(8)])
    widths: list[int] = []
    while len(stream.ended) < 8:
        frame = stream.next()
        if frame.HasField("step"):
            widths.append(len(list(rows(frame))))
    assert widths == [8] * 30


def test_logprobs_arrive_in_columns(client: Client) -> None:
    stream = client.connect()
    stream.send(
        submits=[
            make_submit(1, [5] * 10, 3),
            make_submit(2, [6] * 10, 3, logprobs=2),
            make_submit(3, [7] * 10, 0, prompt_logprobs=0),
        ]
    )
    logprobs: list[pb.LogprobColumns] = []
    prompt_logprobs: list[pb.LogprobColumns] = []
    while len(stream.ended) < 3:
        frame = stream.next()
        keys = list(frame.step.keys)
        if frame.step.HasField("logprobs"):
            columns = frame.step.logprobs
            logprobs.append(columns)
            assert [keys[row] for row in columns.rows] == [2]
            assert len(columns.top_token_ids) == len(columns.top_logprobs) == 2
        if frame.step.HasField("prompt_logprobs"):
            columns = frame.step.prompt_logprobs
            prompt_logprobs.append(columns)
            assert [keys[row] for row in columns.rows] == [3]
    assert [token for columns in logprobs for token in columns.token_ids] == stream.tokens[2]
    assert [list(columns.token_ids) for columns in prompt_logprobs] == [[7] * 9]
    assert [list(columns.counts) for columns in prompt_logprobs] == [[9]]
    assert stream.tokens[3] == []
    assert stream.ends[3] == "LENGTH"


def test_stop_tokens_end_a_request(client: Client) -> None:
    info, stream = client.info(), client.connect()
    answer = answer_to(info, [9, 9], 40)
    stream.submit(1, [9, 9], 40, stop_token_ids=[answer[5]])
    stream.read_until(lambda: 1 in stream.ended)
    assert stream.ends[1] == "STOP"
    assert stream.tokens[1] == answer[: answer.index(answer[5]) + 1]


def test_an_abort_ends_a_request_and_returns_its_pages(client: Client) -> None:
    stream = client.connect()
    stream.submit(1, [1] * 100, 10_000)
    stream.submit(2, [2] * 100, 30)
    stream.read_until(lambda: len(stream.tokens.get(1, [])) > 3)
    stream.send(aborts=[pb.Abort(key=1), pb.Abort(key=77)])
    stream.read_until(lambda: len(stream.ended) == 2)
    assert stream.ends == {1: "ABORT", 2: "LENGTH"}
    assert len(stream.tokens[1]) < 10_000
    assert stream.load.used_pages == 0


def test_two_gateways_use_the_same_keys_and_do_not_meet(worker: WorkerProcess) -> None:
    with Client(worker.address) as first, Client(worker.address) as second:
        info = first.info()
        one, two = first.connect(), second.connect()
        for key in range(10):
            one.submit(key, [key + 1] * 5, 40)
            two.submit(key, [key + 50] * 5, 30)
        one.send(aborts=[pb.Abort(key=3)])
        one.read_until(lambda: len(one.ended) == 10)
        two.read_until(lambda: len(two.ended) == 10)
        for key in range(10):
            assert two.tokens[key] == answer_to(info, [key + 50] * 5, 30)
            if key != 3:
                assert one.tokens[key] == answer_to(info, [key + 1] * 5, 40)


@pytest.mark.parametrize("how", ["half_close", "cancel", "channel"])
def test_the_end_of_a_stream_aborts_its_requests(worker: WorkerProcess, client: Client, how: str) -> None:
    other = client.connect()
    with Client(worker.address) as leaving:
        stream = leaving.connect()
        for key in range(5):
            stream.submit(key, [key + 1] * 100, 10_000)
        stream.read_until(lambda: len(stream.tokens) == 5)
        other.read_until(lambda: other.load.running_requests == 5)
        if how == "half_close":
            stream.half_close()
            assert stream.read_to_end() is grpc.StatusCode.OK
        elif how == "cancel":
            stream.call.cancel()
        else:
            leaving.channel.close()
        other.read_until(lambda: other.load.running_requests == 0)
        assert other.load.used_pages == 0


def test_load_is_reported_every_second_to_a_silent_stream(client: Client) -> None:
    stream = client.connect()
    frames = [stream.next() for _ in range(4)]
    # The first one may tell what is cached.
    reports = [frame for frame in frames if not frame.kv_events]
    assert len(reports) >= 3
    assert all(frame.HasField("load") for frame in reports)


def test_heartbeats_are_echoed(client: Client) -> None:
    stream = client.connect()
    stream.send(heartbeat=pb.Heartbeat(sent_unix_us=123456789))
    while not (frame := stream.next()).HasField("heartbeat"):
        pass
    assert frame.heartbeat.sent_unix_us == 123456789


@pytest.mark.parametrize(
    ("frames", "code", "words"),
    [
        ([{"submits": [make_submit(1, [1], 1)]}], grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        ([{"hello": pb.Hello(protocol_version=2)}], grpc.StatusCode.FAILED_PRECONDITION, "version 1"),
        ([{"hello": pb.Hello(protocol_version=1)}] * 2, grpc.StatusCode.INVALID_ARGUMENT, "hello"),
        (
            [{"hello": pb.Hello(protocol_version=1)}, {"sequence": 3}],
            grpc.StatusCode.INVALID_ARGUMENT,
            "frame 3 came where 2",
        ),
        (
            [{"hello": pb.Hello(protocol_version=1)}, {"submits": [make_submit(1, [1], 999)] * 2}],
            grpc.StatusCode.INVALID_ARGUMENT,
            "still runs",
        ),
    ],
)
def test_a_stream_that_breaks_the_rules_ends_with_a_reason(
    client: Client, frames: list[dict[str, Any]], code: grpc.StatusCode, words: str
) -> None:
    stream = client.connect(greet=False)
    for frame in frames:
        stream.send(**frame)
    assert stream.read_to_end() is code
    stream.half_close()
    assert words in stream.call.details()


def test_a_stream_that_ends_before_its_first_frame_is_out_still_gets_its_status(client: Client) -> None:
    for _ in range(100):  # whether the status overtakes the headers is a matter of luck
        stream = client.connect(greet=False)
        stream.send(hello=pb.Hello(protocol_version=1))
        stream.send(hello=pb.Hello(protocol_version=1))
        assert stream.read_to_end() is grpc.StatusCode.INVALID_ARGUMENT
        stream.half_close()


@pytest.mark.slow
def test_a_reader_that_stalls_is_cut_off_and_disturbs_nobody(worker: WorkerProcess) -> None:
    with Client(worker.address) as stalled_client, Client(worker.address) as client:
        stalled, stream = stalled_client.connect(), client.connect()
        for key in range(60):
            stalled.submit(key, [key + 1] * 10, 16_000, logprobs=20)
        stream.read_until(lambda: stream.load.running_requests == 60)
        while stream.load.running_requests >= 60:
            num_served = len(stream.ended)
            stream.submit(num_served, [5, 6], 20)
            stream.read_until(lambda before=num_served: len(stream.ended) > before)
            stream.next()
        stream.read_until(lambda: stream.load.used_pages == 0)
        assert len(stream.ended) > 5
        assert stalled.read_to_end() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "10 s" in stalled.call.details()


# --- bad input ---------------------------------------------------------------------------------------------------


def test_bad_submits_fail_alone_and_by_name(client: Client) -> None:
    info, stream = client.info(), client.connect()
    bad: list[tuple[pb.Submit, str]] = [
        (make_submit(1, [], 5), "prompt_token_ids"),
        (make_submit(2, [info.vocab_size], 5), "prompt_token_ids"),
        (make_submit(3, [1] * info.context_length_tokens, 1), "prompt_token_ids"),
        (make_submit(4, [1], info.context_length_tokens), "max_tokens"),
        (make_submit(5, [1], 5, temperature=float("nan")), "temperature"),
        (make_submit(6, [1], 5, top_p=-1.0), "top_p"),
        (make_submit(7, [1], 5, logprobs=21), "logprobs"),
        (make_submit(8, [1], 5, stop_token_ids=[1] * 65), "stop_token_ids"),
        (pb.Submit(key=9, prompt_token_ids=[1]), "request_id"),
    ]
    unbuilt: list[tuple[pb.Submit, str]] = [
        (make_submit(11, [1], 5, repetition_penalty=1.5), "repetition_penalty"),
        (make_submit(12, [1], 5, min_tokens=2), "min_tokens"),
        (make_submit(13, [1], 5, thinking_budget=5), "thinking_budget"),
        (make_submit(14, [1], 5, logit_bias=[pb.LogitBias(token_id=1, bias=1)]), "logit_bias"),
        (make_submit(15, [1], 5, logit_processors=["x"]), "logit_processors"),
    ]
    stream.send(submits=[make_submit(100, [4, 4], 20), *(submit for submit, _ in [*bad, *unbuilt])])
    stream.read_until(lambda: len(stream.ended) == 1 + len(bad) + len(unbuilt))
    for cases, code in ((bad, pb.ERROR_CODE_INVALID_ARGUMENT), (unbuilt, pb.ERROR_CODE_UNIMPLEMENTED)):
        for submit, field in cases:
            error = stream.errors[submit.key]
            assert (error.code, error.field) == (code, field)
            assert error.message.startswith(f"{field}: ")
    assert stream.tokens == {100: answer_to(info, [4, 4], 20)}


def test_a_poisoned_request_fails_alone(client: Client) -> None:
    info, stream = client.info(), client.connect()
    for key in range(6):
        stream.submit(key, [key + 1] * 70, 25)
    stream.read_until(lambda: len(stream.tokens) == 6)
    stream.submit(10, [1, 2, POISON, 3], 25)
    stream.read_until(lambda: len(stream.ended) == 7)
    assert stream.errors[10].code == pb.ERROR_CODE_INTERNAL
    for key in range(6):
        assert stream.tokens[key] == answer_to(info, [key + 1] * 70, 25)


def test_a_deadline_ends_a_request(client: Client) -> None:
    stream = client.connect()
    submit = make_submit(1, [1], 10_000)
    submit.deadline_ms = 200
    stream.send(submits=[submit])
    stream.read_until(lambda: 1 in stream.ended)
    assert (stream.errors[1].code, stream.errors[1].field) == (pb.ERROR_CODE_DEADLINE_EXCEEDED, "deadline_ms")
    assert stream.tokens[1], "it ran until then"


def test_flush_is_refused_while_a_request_runs(client: Client) -> None:
    stream = client.connect()
    stream.submit(1, [1] * 130, 10_000)
    stream.read_until(lambda: 1 in stream.tokens)
    with pytest.raises(grpc.RpcError) as caught:
        client.flush()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # pyright: ignore[reportAttributeAccessIssue]
    stream.send(aborts=[pb.Abort(key=1)])
    stream.read_until(lambda: 1 in stream.ended)
    assert client.flush().freed_pages > 0
    assert client.flush().freed_pages == 0


# --- start -------------------------------------------------------------------------------------------------------


def test_the_port_is_reported_before_the_model_and_calls_wait_for_it(model_dir: Path) -> None:
    with WorkerProcess(model_dir) as worker:
        listening = worker.event("listening")
        assert listening["address"].startswith("127.0.0.1:")
        worker.event("ready")
        assert [event["event"] for event in worker.events] == ["listening", "ready"]


def test_a_taken_port_is_one_clear_sentence(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with WorkerProcess(model_dir, "--port", str(port)) as worker:
            assert worker.wait() == 1
            [line] = worker.error_lines()
            assert f"cannot listen on 127.0.0.1:{port}" in line
            assert worker.event("fatal")["message"] in line
            assert "Traceback" not in "".join(worker.errors)


def test_a_folder_without_config_is_one_clear_sentence(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path) as worker:
        assert worker.wait() == 1
        [line] = worker.error_lines()
        assert "config.json does not exist" in line
        assert "Traceback" not in "".join(worker.errors)


def test_a_folder_without_weights_is_one_clear_sentence(model_dir: Path) -> None:
    with WorkerProcess(model_dir, "--runner", "model", "--device", "cpu") as worker:
        assert worker.wait() == 1
        [line] = worker.error_lines()
        assert "safetensors" in line
        assert worker.event("fatal")["message"] in line
        assert "Traceback" not in "".join(worker.errors)
        assert worker.stray == []


def test_metrics_are_served_when_asked_for(model_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with WorkerProcess(model_dir, "--metrics-port", str(port)) as worker, Client(worker.address) as client:
        stream = client.connect()
        stream.submit(1, [1, 2, 3], 7)
        stream.read_until(lambda: 1 in stream.ended)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert 'baleen_worker_generated_tokens_total{model="whale"} 7.0' in text
    assert 'baleen_worker_running_requests{model="whale"} 0.0' in text


def test_the_socket_between_head_and_rank_is_private_and_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    with WorkerProcess(model_dir, environment={"TMPDIR": str(tmp_path)}) as worker:
        worker.event("listening")
        for folder in tmp_path.iterdir():  # gone again as soon as the rank has spoken
            with contextlib.suppress(FileNotFoundError):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        worker.event("ready")
        wait_until(lambda: not list(tmp_path.iterdir()), "the socket's folder is removed")


# --- end ---------------------------------------------------------------------------------------------------------


def test_closing_stdin_ends_everything_at_once(model_dir: Path) -> None:
    with WorkerProcess(model_dir, *SLOW_STEP) as worker, Client(worker.address) as client:
        stream = client.connect()
        stream.submit(1, [1], 10_000)
        stream.read_until(lambda: 1 in stream.tokens)
        family = worker.family()
        assert len(family) == 2
        worker.close_stdin()
        assert worker.wait() == 0
        wait_until(lambda: gone(family), "head and rank are gone")
        assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_supervised_worker_drains_and_waits_for_its_supervisor(model_dir: Path, number: signal.Signals) -> None:
    with WorkerProcess(model_dir, *SLOW_STEP) as worker, Client(worker.address) as client:
        info, stream = client.info(), client.connect()
        stream.submit(1, [1, 2], 100)
        stream.read_until(lambda: 1 in stream.tokens)
        for process in worker.family():  # as a terminal does it, to the whole group
            process.send_signal(number)
        stream.read_until(lambda: stream.draining)
        stream.submit(2, [1, 2], 5)
        stream.read_until(lambda: len(stream.ended) == 2)
        assert stream.errors[2].code == pb.ERROR_CODE_UNAVAILABLE
        assert stream.tokens[1] == answer_to(info, [1, 2], 100)
        health = health_pb2_grpc.HealthStub(client.channel)
        status = health.Check(health_pb2.HealthCheckRequest()).status  # pyright: ignore[reportAttributeAccessIssue]
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        late = client.connect()
        assert late.draining
        worker.process.send_signal(number)  # a second one changes nothing
        late.next()
        assert worker.process.poll() is None
        worker.close_stdin()
        assert worker.wait() == 0


def test_an_unsupervised_worker_drains_and_exits(model_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with WorkerProcess(model_dir, "--port", str(port), *SLOW_STEP, supervised=False) as worker:
        wait_until(lambda: any("ready" in line for line in worker.errors), "the worker is ready")
        with Client(f"127.0.0.1:{port}") as client:
            info, stream = client.info(), client.connect()
            stream.submit(1, [1, 2], 100)
            stream.read_until(lambda: 1 in stream.tokens)
            worker.process.send_signal(signal.SIGTERM)
            assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE
            assert stream.tokens[1] == answer_to(info, [1, 2], 100)
            assert stream.ends[1] == "LENGTH"
        assert worker.wait() == 0
        assert worker.stray == []


def test_a_second_signal_ends_an_unsupervised_worker_at_once(model_dir: Path) -> None:
    with WorkerProcess(model_dir, "--port", "0", *SLOW_STEP, supervised=False) as worker:
        wait_until(lambda: any("ready" in line for line in worker.errors), "the worker is ready")
        address = next(line.split()[-1] for line in worker.errors if "listening on" in line)
        with Client(address) as client:
            stream = client.connect()
            stream.submit(1, [1, 2], 10_000)
            stream.read_until(lambda: 1 in stream.tokens)
            family = worker.family()
            worker.process.send_signal(signal.SIGINT)
            stream.read_until(lambda: stream.draining)
            worker.process.send_signal(signal.SIGINT)
            assert worker.wait() == 1
            wait_until(lambda: gone(family), "the rank is gone too")


def test_the_ranks_death_ends_the_streams_and_the_head_and_blames_no_request(model_dir: Path) -> None:
    with WorkerProcess(model_dir, *SLOW_STEP) as worker, Client(worker.address) as client:
        stream = client.connect()
        stream.submit(1, [1], 10_000)
        stream.submit(2, [2], 10_000)
        stream.read_until(lambda: len(stream.tokens) == 2)
        worker.rank.kill()
        assert stream.read_to_end() is grpc.StatusCode.UNAVAILABLE
        assert not stream.errors
        assert worker.wait() == 1
        assert worker.event("fatal")["message"] == "the rank process died of signal 9 (SIGKILL)"
        assert len(worker.error_lines()) == 1


@pytest.mark.parametrize("rank_is_stopped", [False, True])
def test_no_process_survives_the_heads_death(model_dir: Path, rank_is_stopped: bool) -> None:
    with WorkerProcess(model_dir, *SLOW_STEP) as worker, Client(worker.address) as client:
        stream = client.connect()
        stream.submit(1, [1], 10_000)
        stream.read_until(lambda: 1 in stream.tokens)
        family = worker.family()
        assert len(family) == 2
        if rank_is_stopped:  # it cannot notice anything by itself then
            worker.rank.suspend()
        worker.process.kill()
        worker.wait()
        wait_until(lambda: gone(family), "the rank is gone")


def test_head_and_rank_import_no_torch_with_the_fake_runner(worker: WorkerProcess) -> None:
    for process in worker.family():
        libraries = {Path(mapping.path).name for mapping in process.memory_maps()}
        assert not {name for name in libraries if name.startswith("libtorch")}


def test_an_idle_rank_sleeps(worker: WorkerProcess, client: Client) -> None:
    stream = client.connect()
    stream.read_until(lambda: stream.load.running_requests == 0)
    before = worker.rank.cpu_times()
    began_s = time.monotonic()
    while time.monotonic() - began_s < 1.5:
        stream.next()
    after = worker.rank.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    assert used_s < 0.5, "a busy loop would have used all of the time"


def test_the_generated_code_is_what_the_contract_generates() -> None:
    root = Path(__file__).resolve().parents[3]
    pytest.importorskip("grpc_tools")
    environment = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, str(root / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_cached_is_told_on_every_stream(client: Client) -> None:
    client.flush()
    stream, listener = client.connect(), client.connect()
    prompt = list(range(1, 131))
    stream.submit(1, prompt, 3)
    for reader in (stream, listener):
        while not (frame := reader.next()).kv_events:
            pass
        [event] = frame.kv_events
        assert list(event.stored.page_hashes) == page_names(prompt)
        assert (event.event_id > 0, event.stored.page_size_tokens) == (True, 64)
    stream.read_until(lambda: 1 in stream.ended)
    late = client.connect()
    while not (frame := late.next()).kv_events:
        pass
    assert [(kv.event_id, list(kv.stored.page_hashes)) for kv in frame.kv_events] == [(0, page_names(prompt))]
    client.flush()
    while not (frame := listener.next()).kv_events:
        pass
    assert [event.WhichOneof("event") for event in frame.kv_events] == ["cleared"]
    assert [kv.event_id for kv in frame.kv_events] == [event.event_id + 1]
