"""Prefill and decode workers over real sockets: the tokens of one worker, and what happens when either fails."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import grpc
import pytest
from baleen_worker.fake_runner import expected_logprobs
from baleen_worker.pb import worker_pb2 as pb
from pair import Pair
from worker_process import WorkerProcess, answer_to, copy_model

PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
DECODE = ("--disaggregation-mode", "decode")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workers(model_dir: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    with WorkerProcess(model_dir, *PREFILL) as prefill, WorkerProcess(model_dir, *DECODE) as decode:
        yield prefill, decode
        assert prefill.process.poll() is decode.process.poll() is None, "a test ended a shared worker"


@pytest.fixture
def pair(workers: tuple[WorkerProcess, WorkerProcess]) -> Iterator[Pair]:
    with Pair(*workers) as pair:
        yield pair


def test_both_say_what_they_are(pair: Pair) -> None:
    assert (pair.prefill.info.role, pair.decode.info.role) == (pb.ROLE_PREFILL, pb.ROLE_DECODE)
    [endpoint] = pair.prefill.info.transfer_endpoints
    assert endpoint.backend == "tcp"
    assert not pair.decode.info.transfer_endpoints
    assert pair.prefill.info.layout_id == pair.decode.info.layout_id


def test_the_way_between_them_can_be_tried(pair: Pair) -> None:
    """Also while nothing runs, which is when a gateway asks."""
    [endpoint] = pair.prefill.info.transfer_endpoints
    epoch = pair.prefill.info.boot_epoch
    for side in (pair.prefill, pair.decode):
        assert "probe_transfer" in side.info.features
    tried = [pair.decode.client.probe(peer=endpoint, peer_boot_epoch=epoch) for _ in range(3)]
    assert [answer.failure for answer in tried] == [""] * 3
    assert all(answer.duration_us > 0 for answer in tried)
    other = pair.decode.client.probe(peer=endpoint, peer_boot_epoch=epoch + 1)
    assert other.failure == "the worker there has been started anew"


@pytest.mark.parametrize(
    ("side", "address", "code"),
    [
        ("prefill", "127.0.0.1:1", grpc.StatusCode.FAILED_PRECONDITION),
        ("decode", "localhost", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_trial_that_makes_no_sense_is_refused(pair: Pair, side: str, address: str, code: grpc.StatusCode) -> None:
    client = {"prefill": pair.prefill.client, "decode": pair.decode.client}[side]
    with pytest.raises(grpc.RpcError) as refused:
        client.probe(peer=pb.TransferEndpoint(backend="tcp", address=address))
    assert refused.value.code() == code  # pyright: ignore[reportAttributeAccessIssue] - a call is an error too


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 1000, 5000])
def test_the_answer_is_that_of_one_worker(pair: Pair, length: int) -> None:
    prompt = [length % 97 + 1] * length
    pair.ask(length, prompt, 70)
    pair.finish(length)
    assert pair.prefill.stream.ends == {length: "HANDED_OVER"}
    assert pair.prefill.stream.tokens == {length: []}
    assert pair.decode.stream.ends == {length: "LENGTH"}
    assert pair.decode.stream.tokens[length] == answer_to(pair.decode.info, prompt, 70)


def test_many_at_once(pair: Pair) -> None:
    prompts = {key: [key % 97 + 1] * (key * 37 % 700 + 1) for key in range(1, 65)}
    legs = [pair.submits(key, prompt, 20) for key, prompt in prompts.items()]
    pair.decode.stream.send(submits=[decode for _, decode in legs])
    pair.prefill.stream.send(submits=[prefill for prefill, _ in reversed(legs)])
    pair.finish(*prompts)
    for key, prompt in prompts.items():
        assert pair.decode.stream.tokens[key] == answer_to(pair.decode.info, prompt, 20)
    assert set(pair.prefill.stream.ends.values()) == {"HANDED_OVER"}
    for side in (pair.prefill, pair.decode):
        side.stream.read_until(lambda stream=side.stream: stream.load.running_requests == stream.load.used_pages == 0)


def test_what_the_decode_worker_has_cached_does_not_travel(pair: Pair) -> None:
    prompt = [7, *range(400)]
    pair.ask(1, prompt, 5)
    pair.finish(1)
    pair.ask(2, prompt, 5)
    pair.finish(2)
    assert pair.decode.stream.tokens[2] == pair.decode.stream.tokens[1] == answer_to(pair.decode.info, prompt, 5)


def test_log_probabilities_of_prompt_and_answer_come_too(pair: Pair) -> None:
    prompt = [11, *range(3, 300)]
    pair.ask(1, prompt, 4, logprobs=2, prompt_logprobs=1)
    scored: list[float] = []
    told: list[float] = []
    while 1 not in pair.decode.stream.ended:
        step = pair.decode.stream.next().step
        scored += step.prompt_logprobs.logprobs
        told += step.logprobs.logprobs
    answer = answer_to(pair.decode.info, prompt, 4)
    assert scored == pytest.approx(expected_logprobs(prompt, 1))
    assert told == pytest.approx(expected_logprobs(prompt + answer, len(prompt)))


def test_both_legs_go_on_after_an_earlier_attempt(pair: Pair) -> None:
    prompt = [13] * 100
    answer = answer_to(pair.decode.info, prompt, 90)
    pair.ask(1, prompt, 90, resumed_token_ids=answer[:50], attempt=1)
    pair.finish(1)
    assert pair.decode.stream.tokens[1] == answer[50:]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_aborting_one_leg_frees_its_side_and_fails_the_other(pair: Pair, side: str) -> None:
    """The prefill leg is held, or the decode leg waits, for ever: nobody submits the other half."""
    legs: dict[str, pb.Submit] = dict(zip(("prefill", "decode"), pair.submits(1, [17] * 200, 20), strict=True))
    stream = {"prefill": pair.prefill.stream, "decode": pair.decode.stream}[side]
    stream.send(submits=[legs[side]])
    stream.read_until(lambda: stream.load.running_requests + stream.load.waiting_requests == 1)
    stream.send(aborts=[pb.Abort(key=1)])
    stream.read_until(lambda: 1 in stream.ended)
    assert stream.ends == {1: "ABORT"}
    stream.read_until(lambda: stream.load.used_pages == stream.load.waiting_requests == 0)


def test_a_peer_that_is_another_by_now_is_refused(pair: Pair) -> None:
    prefill, decode = pair.submits(1, [19] * 200, 20)
    decode.disaggregation.peer_boot_epoch += 1
    pair.prefill.stream.send(submits=[prefill])
    pair.decode.stream.send(submits=[decode])
    pair.decode.stream.read_until(lambda: 1 in pair.decode.stream.ended)
    error = pair.decode.stream.errors[1]
    assert error.code == pb.ERROR_CODE_PEER_FAILED
    assert "started anew" in error.message
    pair.prefill.stream.send(aborts=[pb.Abort(key=1)])
    pair.prefill.stream.read_until(lambda: 1 in pair.prefill.stream.ended)


def test_a_leg_that_was_handed_over_is_not_handed_over_again(pair: Pair) -> None:
    prefill, decode = pair.submits(1, [31] * 200, 20)
    pair.prefill.stream.send(submits=[prefill])
    pair.decode.stream.send(submits=[decode])
    pair.finish(1)
    decode.key = 2
    pair.decode.stream.send(submits=[decode])
    pair.decode.stream.read_until(lambda: 2 in pair.decode.stream.ended)
    assert pair.decode.stream.errors[2].code == pb.ERROR_CODE_PEER_FAILED


def test_legs_are_refused_by_name_where_they_do_not_belong(pair: Pair) -> None:
    prefill, decode = pair.submits(1, [23] * 10, 20)
    pair.prefill.stream.send(submits=[decode])
    pair.decode.stream.send(submits=[prefill])
    no_seed, no_address = pair.submits(2, [23] * 10, 20)
    no_seed.sampling.ClearField("seed")
    no_address.disaggregation.peer.address = "localhost"
    pair.prefill.stream.send(submits=[no_seed])
    pair.decode.stream.send(submits=[no_address])
    pair.finish(1, 2)
    assert {key: error.field for key, error in pair.prefill.stream.errors.items()} == {1: "disaggregation", 2: "seed"}
    assert {error.field for error in pair.decode.stream.errors.values()} == {"disaggregation"}


def test_either_serves_whole_requests_too(pair: Pair) -> None:
    for side in (pair.prefill, pair.decode):
        side.stream.submit(1, [29] * 100, 10)
        side.stream.read_until(lambda stream=side.stream: 1 in stream.ended)
        assert side.stream.tokens[1] == answer_to(side.info, [29] * 100, 10)


# --- deaths ----------------------------------------------------------------------------------------------------------

SHORT = ("--disaggregation-progress-s", "2", "--disaggregation-lease-s", "3", "--fake-step-ms", "20")


@contextlib.contextmanager
def short_pair(model_dir: Path) -> Generator[tuple[WorkerProcess, WorkerProcess, Pair]]:
    """Workers of their own, impatient and slow."""
    with (
        WorkerProcess(model_dir, *PREFILL, *SHORT, "--chunked-prefill-size", "64") as prefill,
        WorkerProcess(model_dir, *DECODE, *SHORT) as decode,
        Pair(prefill, decode) as pair,
    ):
        yield prefill, decode, pair


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_worker_that_dies_or_hangs_fails_its_decode_legs_alone(model_dir: Path, how: signal.Signals) -> None:
    """Mid-way: the prompt takes 200 steps, and the worker is gone after some of them."""
    with short_pair(model_dir) as (prefill, _, pair):
        pair.decode.stream.submit(1, [5] * 100, 400)
        pair.ask(2, [6] * 64 * 200, 20)
        pair.decode.stream.read_until(lambda: len(pair.decode.stream.tokens.get(1, [])) > 15)
        prefill.rank.send_signal(how)
        pair.decode.stream.read_until(lambda: 2 in pair.decode.stream.ended)
        assert pair.decode.stream.errors[2].code == pb.ERROR_CODE_PEER_FAILED
        pair.decode.stream.read_until(lambda: 1 in pair.decode.stream.ended)
        assert pair.decode.stream.tokens[1] == answer_to(pair.decode.info, [5] * 100, 400)
        pair.decode.stream.read_until(lambda: pair.decode.stream.load.used_pages == 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_pages_of_a_dead_decode_worker_come_back(model_dir: Path, how: signal.Signals) -> None:
    with short_pair(model_dir) as (_, decode, pair):
        pair.ask(1, [6] * 64 * 200, 20)
        pair.prefill.stream.read_until(lambda: pair.prefill.stream.load.steps > 5)
        decode.rank.send_signal(how)
        pair.prefill.stream.read_until(lambda: 1 in pair.prefill.stream.ended)
        assert pair.prefill.stream.errors[1].code == pb.ERROR_CODE_PEER_FAILED
        pair.prefill.stream.read_until(lambda: pair.prefill.stream.load.used_pages == 0)
