"""Stacks that the end-to-end tests talk to: a real gateway with a real worker behind a real socket.

Tests that only ask share one stack a session; a test that breaks something starts its own through `start`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import openai
import pytest
from harness.processes import ROOT, Gateway, serve_arguments
from harness.script import PLAY, write_script


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_open() -> Iterator[None]:
    """Collects what a file's tests dropped, so that a socket left open is blamed on that file, not on a later one."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def fake_stack() -> Iterator[Gateway]:
    """Answers at once with deterministic tokens."""
    with Gateway(*serve_arguments("fake")) as gateway:
        yield gateway.ready()


@pytest.fixture(scope="session")
def slow_stack() -> Iterator[Gateway]:
    """The same at 20 ms a step, so that a test can act while a stream runs."""
    with Gateway(*serve_arguments("fake", "--fake-step-ms", "20")) as gateway:
        yield gateway.ready()


@pytest.fixture(scope="session")
def model_stack() -> Iterator[Gateway]:
    """Computes the micro model in float32, with the plugin of `harness.plugin`, and with one that raises."""
    plugins = ["--logit-processor", "repeat-prompt=harness.plugin:repeat_prompt"]
    plugins += ["--logit-processor", "breaks=json:loads"]  # the reader of JSON takes no logits
    arguments = serve_arguments("model", "--dtype", "float32", *plugins)
    with Gateway(*arguments, env={"PYTHONPATH": str(ROOT / "tests")}) as gateway:
        yield gateway.ready()


@pytest.fixture(scope="session")
def scripted_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Says what `harness.script.PLAY` has it say, at 2 ms a token."""
    script = write_script(tmp_path_factory.mktemp("script") / "play.jsonl", PLAY)
    with Gateway(*serve_arguments("fake", "--fake-step-ms", "2", "--fake-script", str(script))) as gateway:
        yield gateway.ready()


@pytest.fixture(params=["fake", "model"])
def stack(request: pytest.FixtureRequest) -> Gateway:
    """Either of the two in turn."""
    return request.getfixturevalue(f"{request.param}_stack")


@pytest.fixture
def client(stack: Gateway) -> Iterator[openai.OpenAI]:
    with stack.client() as client:
        yield client


@pytest.fixture
def start() -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway of this test alone and waits until it is ready."""
    with ExitStack() as running:

        def start_gateway(*arguments: str) -> Gateway:
            return running.enter_context(Gateway(*arguments)).ready()

        yield start_gateway
