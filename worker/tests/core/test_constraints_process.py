"""Constraints over gRPC, with the trial in a process of its own: served, refused in time, and gone with the worker."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import psutil
import pytest
from baleen_worker.pb import worker_pb2 as pb
from constrained_rig import MICRO, check_json, draw_schema, text_of
from hostile_constraints import hostile_constraints
from worker_process import Client, WorkerProcess, answer_to, gone, make_submit, wait_until

# The first constraint waits for two processes to import torch, on a machine that may be busy.
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(MICRO, "--constraint-compile-ms", "1000") as process:
        yield process
        family = process.family()
        assert any("baleen_worker.grammar.trial" in " ".join(member.cmdline()) for member in family)
        process.close_stdin()
        process.wait()
        assert gone(family), "the trial process outlives its worker"


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client(worker.address) as client:
        yield client


def constrained(key: int, kind: str, source: str, max_tokens: int = 300) -> pb.Submit:
    submit = make_submit(key, [5, 6, 7 + key % 100], max_tokens, seed=key)
    setattr(submit, kind, source)
    return submit


def test_the_worker_says_what_it_can_enforce(client: Client) -> None:
    assert {"json_schema", "regex", "ebnf", "structural_tag"} <= set(client.info().features)
    assert "penalties" not in client.info().features, "the fake runner has no logits"


def test_constrained_answers_match_and_their_neighbours_are_as_ever(client: Client) -> None:
    info, stream = client.info(), client.connect()
    g = random.Random(4)
    schemas = {key: draw_schema(g) for key in range(20)}
    submits = [constrained(key, "json_schema", json.dumps(schema)) for key, schema in schemas.items()]
    submits.append(constrained(20, "regex", "(krill|whale){2}"))
    submits.append(constrained(21, "ebnf", 'root ::= "x" | "y" root'))
    stream.send(submits=[*submits, make_submit(100, [4, 4], 50)])
    stream.read_until(lambda: len(stream.ended) == len(submits) + 1, TIMEOUT_S)
    assert stream.errors == {}
    for key, schema in schemas.items():
        check_json(stream.tokens[key], schema)
    assert re.fullmatch("(krill|whale){2}", text_of(stream.tokens[20]))
    assert set(text_of(stream.tokens[21])) <= {"x", "y"}
    assert stream.tokens[100] == answer_to(info, [4, 4], 50)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_hostile_constraints_are_served_or_refused_and_nobody_else_notices(client: Client, count: int) -> None:
    info, stream = client.info(), client.connect()
    hostile = hostile_constraints(count)
    stream.send(submits=[constrained(key, kind, source, 8) for key, (kind, source) in enumerate(hostile)])
    stream.send(submits=[make_submit(1000 + key, [key, 4], 100) for key in range(5)])
    stream.read_until(lambda: len(stream.ended) == count + 5, TIMEOUT_S)
    for key in range(5):
        assert stream.tokens[1000 + key] == answer_to(info, [key, 4], 100)
    for key, (kind, _) in enumerate(hostile):
        if key in stream.errors:
            error = stream.errors[key]
            assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, kind), error
    assert stream.errors, "none of them was hostile"
    assert any("too large to compile within 1 s" in error.message for error in stream.errors.values())
    # The server of trials has outlived them all.
    stream.send(submits=[constrained(5000, "regex", f"after all {count}")])
    stream.read_until(lambda: 5000 in stream.ended, TIMEOUT_S)
    assert text_of(stream.tokens[5000]) == f"after all {count}"


def test_a_server_of_trials_that_dies_is_replaced(worker: WorkerProcess, client: Client) -> None:
    def server() -> psutil.Process:
        servers = [member for member in worker.family() if "baleen_worker.grammar.trial" in " ".join(member.cmdline())]
        return servers[0]

    stream = client.connect()
    stream.send(submits=[constrained(7000, "regex", "before it dies")])
    stream.read_until(lambda: 7000 in stream.ended, TIMEOUT_S)
    dead = server()
    dead.kill()
    wait_until(lambda: not dead.is_running() or dead.status() == psutil.STATUS_ZOMBIE, "the server is dead")
    stream.send(submits=[constrained(7001, "regex", "after it died")])
    stream.read_until(lambda: 7001 in stream.ended, TIMEOUT_S)
    assert stream.errors == {}
    assert text_of(stream.tokens[7001]) == "after it died"
    assert server().pid != dead.pid
