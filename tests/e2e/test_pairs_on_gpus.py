"""Prefill on one GPU and decode on another, pages read from lent memory: the answers of one worker, whatever dies.

CUDA_VISIBLE_DEVICES names the two, or one for both. On a CPU pages come over TCP, and the same is asked of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from chaos.trap import FOLDER_VARIABLE, KILL, Order, Trap
from harness.processes import CAPACITY, MICRO_MODEL, ROOT, Gateway, Process, free_port, wait_for, worker_counters

pytestmark = pytest.mark.timeout(900)

ON_GPU = "--device cuda --mem-fraction-static 0.2 --cuda-graph-bs 1 4 --kv-cache-dtype {}"
FLAGS = "--runner model --chunked-prefill-size 256 --max-running-requests 16"
_FOLDERS = [*(str(ROOT / part) for part in ("tests", "worker", "kernels")), os.environ.get("PYTHONPATH", "")]
PATH = {"PYTHONPATH": os.pathsep.join(_FOLDERS)}
# Of one chunk and of many; none is cached where another was asked.
PROMPTS = [f"{number}. " + "The sea is deep and wide. " * (1 + 60 * number) for number in range(5)]
ROLES = (("prefill", 0), ("prefill", 1), ("decode", 0))
# Pages of the first chunk are read as the second is announced; all but the token has come at the end.
ORDERS = (Order("announced", KILL, skip=1), Order("finishing", KILL))


def flags(kind: str) -> list[str]:
    """Of every worker of a kind: "cpu", or the format of latents on a GPU."""
    return [*FLAGS.split(), *CAPACITY, *("--device cpu" if kind == "cpu" else ON_GPU.format(kind)).split()]


class Side:
    """A worker of a pair on its GPU, which dies at a phase when it is told to and comes back at the same port."""

    def __init__(self, role: str, kind: str, folder: Path) -> None:
        folder.mkdir()
        self.role = role
        self.trap = Trap(folder)
        port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        backend = "tcp" if kind == "cpu" else "cuda_ipc"
        pair = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
        if role == "prefill":
            pair += ["--disaggregation-bootstrap-port", "0"]
        self._command = [sys.executable, "-m", "chaos.worker", str(MICRO_MODEL), *flags(kind), *pair]
        self._command += ["--port", str(port), "--metrics-port", str(self._metrics_port)]
        self._environment = {FOLDER_VARIABLE: str(folder), **PATH, "CUDA_VISIBLE_DEVICES": visible(role)}
        self._process: Process | None = None

    def start(self) -> None:
        """Starts it, for the first time or again."""
        self.stop()
        self._process = Process(self._command, env=self._environment)

    def stop(self) -> None:
        """Ends what is left of it."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def counter(self, name: str) -> float:
        """What it tells of itself."""
        return worker_counters(self._metrics_port)[f"{name}_total"]


def visible(role: str) -> str:
    """What CUDA_VISIBLE_DEVICES says for a role: the first of this process's GPUs, and the last for decoding."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    return own[-1 if role == "decode" else 0]


def answers(gateway: Gateway, prompts: list[str]) -> list[str]:
    """Greedy, one after the other: what shares a batch shares its rounding."""
    with gateway.client() as client:
        return [ask(client, prompt) for prompt in prompts]


def ask(client: openai.OpenAI, prompt: str) -> str:
    """A completion's text."""
    done = client.completions.create(
        model="micro", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    return done.choices[0].text


def wait_until_ready(gateway: Gateway, num_workers: int) -> None:
    wait_for("all workers are ready", lambda: gateway.metrics()["baleen_worker_ready"] == num_workers, 300)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.gpu),
        pytest.param("fp8_e4m3", marks=pytest.mark.gpu),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_answers_are_those_of_one_worker_and_a_death_costs_nobody_anything(
    kind: str, running: ExitStack, tmp_path: Path
) -> None:
    sides = [Side(role, kind, tmp_path / f"{role}-{number}") for role, number in ROLES]
    for side in sides:
        running.callback(side.stop)
        side.start()
    environment = {**PATH, "CUDA_VISIBLE_DEVICES": visible("prefill")}
    alone = running.enter_context(Gateway("serve", str(MICRO_MODEL), *flags(kind), env=environment))
    pairs = running.enter_context(Gateway(*[word for side in sides for word in (f"--{side.role}", side.address)]))
    wait_until_ready(alone, 1)
    wait_until_ready(pairs, len(sides))
    expected = answers(alone, PROMPTS)
    assert answers(pairs, PROMPTS) == expected
    decode = sides[-1]
    assert decode.counter("baleen_worker_received_pages") > len(PROMPTS)
    victim = sides[0]
    for order in ORDERS:
        prompts = [f"{order.phase}: {prompt}" for prompt in PROMPTS[1:]]  # cached nowhere
        expected = answers(alone, prompts)
        victim.trap.set(order)
        assert answers(pairs, prompts) == expected, order
        assert victim.trap.sprang, f"nothing died at {order}"
        victim.start()
        wait_until_ready(pairs, len(sides))
    assert decode.counter("baleen_worker_damaged_reads") == 0
