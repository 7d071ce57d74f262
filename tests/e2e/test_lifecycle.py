"""Starting, stopping and dying: what clients see, what is left behind, and what the operator is told."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.processes import MICRO_MODEL, Gateway, Process, Worker, free_port, is_alive, serve_arguments, wait_for

MODEL = "micro"
MESSAGES: list[Any] = [{"role": "user", "content": "Count the waves."}]
# So long that nobody has waited for it where a stack is gone before the patience of a test ends.
FOREVER_S = "3600"

Start = Callable[..., Gateway]


def open_stream(client: openai.OpenAI, max_tokens: int = 200) -> Any:
    """A chat stream of which a few chunks have been read."""
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    for _ in range(4):
        next(chunks)
    return chunks


def text_of(lines: list[str]) -> str:
    """What the deltas of a stream say together."""
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines if line != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def raw_stream(gateway: Gateway, kill: Callable[[], None], max_tokens: int = 10_000) -> list[str]:
    """Every `data:` line of a stream during which `kill` is called once some tokens have come."""
    body = {"messages": MESSAGES, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            lines.append(line.removeprefix("data:").strip())
            if len(lines) == 5:
                kill()
    return lines


def answer_of(gateway: Gateway) -> str:
    with gateway.client() as client:
        choice = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        ).choices[0]
    return choice.message.content or ""


def run_to_exit(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a gateway that is expected to give up by itself."""
    with Gateway(*arguments, env=env) as gateway:
        return gateway.wait(120), gateway.log()


def error_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error: ")]


# --- start


def test_the_embedded_model_is_served_and_the_banners_curl_works(start: Start) -> None:
    gateway = start("serve")
    with gateway.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
    assert answer_of(gateway)
    banner = wait_for("the banner is printed", lambda: gateway.log() if "curl " in gateway.log() else "")
    assert gateway.url in banner
    assert MODEL in banner
    command = re.search(r"curl .*?[^\\]$", banner, re.DOTALL | re.MULTILINE)
    assert command is not None
    text = re.sub(r"\x1b\[[0-9;]*m", "", command.group(0))
    shown = subprocess.run(["sh", "-c", text], stdout=subprocess.PIPE, text=True, timeout=60)
    assert shown.returncode == 0, text
    assert "choices" in shown.stdout, (text, shown.stdout)


def test_the_name_of_the_model_can_be_chosen(start: Start) -> None:
    gateway = start(*serve_arguments("fake", "--served-model-name", "deepseek-chat"))
    with gateway.client() as client:
        assert [model.id for model in client.models.list()] == ["deepseek-chat"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=MODEL, prompt="x")


def test_probes_and_facts(fake_stack: Gateway) -> None:
    for path in ("/health", "/livez", "/readyz"):
        assert httpx.get(f"{fake_stack.url}{path}").status_code == 200, path
    version = httpx.get(f"{fake_stack.url}/version").raise_for_status().json()
    assert version["version"]
    assert httpx.post(f"{fake_stack.url}/flush_cache").status_code == 200


def test_launch_flags_of_the_guide_are_accepted_or_refused_with_a_sentence(start: Start) -> None:
    accepted = ["--trust-remote-code", "--disable-radix-cache", "--disable-cuda-graph", "--cuda-graph-bs", "1", "2"]
    accepted += ["--attention-backend", "nsa", "--tp", "1"]
    assert answer_of(start(*serve_arguments("fake", *accepted)))
    for refused in (["--tp", "8"], ["--speculative-algorithm", "EAGLE"], ["--enable-dp-attention"]):
        code, log = run_to_exit(*serve_arguments("fake", *refused))
        assert code != 0
        (sentence,) = error_lines(log)
        assert refused[0] in sentence


def test_an_unknown_flag_is_named() -> None:
    code, log = run_to_exit(*serve_arguments("fake", "--frobnicate"))
    assert code != 0
    assert "--frobnicate" in log


def test_a_python_without_torch_or_no_python_is_told_clearly(tmp_path: Path) -> None:
    code, log = run_to_exit(*serve_arguments("fake", "--python", str(tmp_path / "nowhere" / "python3")))
    assert code != 0
    (sentence,) = error_lines(log)
    assert "python" in sentence.lower()


def test_a_port_in_use_is_told_clearly(fake_stack: Gateway) -> None:
    port = fake_stack.url.rpartition(":")[2]
    command = [*fake_stack.process.args[:1], *serve_arguments("fake"), "--port", port]  # type: ignore[index]
    with Process([str(part) for part in command]) as second:
        assert second.wait(60) != 0
        (sentence,) = error_lines(second.log())
        assert port in sentence


def break_model(folder: Path, how: str) -> None:
    """Damages a copy of the micro model in one way."""
    weights = min(folder.glob("*.safetensors"))
    config = folder / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "corrupt header":
        data = bytearray(weights.read_bytes())
        data[8:40] = b"\xff" * 32
        weights.write_bytes(bytes(data))
    elif how == "missing shard":
        max(folder.glob("*.safetensors")).unlink()
    elif how == "missing weights":
        for path in folder.glob("*.safetensors*"):
            path.unlink()
    elif how == "pickled weights":
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    elif how == "missing config":
        config.unlink()
    elif how == "config without a key":
        fields = json.loads(config.read_text("utf-8"))
        del fields["kv_lora_rank"]
        config.write_text(json.dumps(fields), "utf-8")
    elif how == "config that is not JSON":
        config.write_text('{"model_type": ', "utf-8")
    elif how == "unknown model type":
        fields = json.loads(config.read_text("utf-8"))
        fields["model_type"], fields["architectures"] = "llama", ["LlamaForCausalLM"]
        config.write_text(json.dumps(fields), "utf-8")
    elif how == "missing tokenizer":
        (folder / "tokenizer.json").unlink()
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("truncated", ".safetensors"),
        # The same way to the same sentence, each a start of PyTorch; worker/tests/run/test_checkpoint.py has them all.
        pytest.param("corrupt header", ".safetensors", marks=pytest.mark.slow),
        pytest.param("missing shard", "model-00002-of-00002.safetensors", marks=pytest.mark.slow),
        pytest.param("missing weights", "safetensors", marks=pytest.mark.slow),
        pytest.param("pickled weights", "pytorch_model.bin", marks=pytest.mark.slow),
        ("missing config", "config.json"),
        ("config without a key", "kv_lora_rank"),
        ("config that is not JSON", "config.json"),
        ("unknown model type", "llama"),
        ("missing tokenizer", "tokenizer.json"),
    ],
)
def test_a_damaged_model_is_one_clear_error(tmp_path: Path, how: str, named: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MICRO_MODEL, folder)
    break_model(folder, how)
    code, log = run_to_exit("serve", str(folder))
    assert code != 0
    (sentence,) = set(error_lines(log))
    assert named in sentence
    assert "Traceback" not in log


def test_a_model_directory_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    code, log = run_to_exit("serve", str(tmp_path / "nowhere"))
    assert code != 0
    (sentence,) = set(error_lines(log))
    assert "nowhere" in sentence


# --- a worker started by hand


def test_a_gateway_in_front_of_a_running_worker_needs_no_model_directory(start: Start) -> None:
    with Worker(str(MICRO_MODEL), "--runner", "fake") as worker:
        plain = start("--worker", worker.address)
        schemed = start("--worker", f"grpc://{worker.address}")
        assert answer_of(plain) == answer_of(schemed) != ""
        plain.signal(signal.SIGTERM)
        assert plain.wait() == 0
        worker.require_running()
        assert answer_of(schemed)


def test_a_worker_that_comes_back_is_used_again(start: Start) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "baleen_worker", str(MICRO_MODEL), "--runner", "fake", "--port", port]
    with Process(command):
        gateway = start("--worker", f"127.0.0.1:{port}")
        assert answer_of(gateway)
    wait_for("the gateway notices", lambda: not gateway.is_ready())
    with Process(command):
        gateway.ready()
        assert answer_of(gateway)


def test_an_unsupervised_worker_drains_and_exits(start: Start) -> None:
    with Worker(str(MICRO_MODEL), "--runner", "fake", "--fake-step-ms", "20") as worker:
        gateway = start("--worker", worker.address)
        with gateway.client() as client:
            chunks = open_stream(client, max_tokens=60)
            worker.signal(signal.SIGTERM)
            rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert worker.wait() == 0


# --- stop


# To the gateway alone or to all, by hand or by a service manager.
SIGNALS = list(itertools.product([False, True], [signal.SIGTERM, signal.SIGINT]))


@pytest.mark.parametrize(
    ("runner", "whole_group", "number"),
    [
        *[("fake", *how) for how in SIGNALS],
        ("model", True, signal.SIGINT),
        *[pytest.param("model", *how, marks=pytest.mark.slow) for how in SIGNALS if how != (True, signal.SIGINT)],
    ],
)
def test_an_idle_stack_has_nothing_to_wait_for(start: Start, runner: str, whole_group: bool, number: int) -> None:
    """bench/startup.py measures how long it takes."""
    gateway = start(*serve_arguments(runner, "--drain-timeout-s", FOREVER_S))
    assert answer_of(gateway)
    family = gateway.family()
    assert len(family) >= 3
    (gateway.signal_group if whole_group else gateway.signal)(number)
    assert gateway.wait() == 0
    wait_for("every process is gone", lambda: not any(is_alive(process) for process in family))


@pytest.mark.parametrize("whole_group", [False, True])
def test_streams_finish_after_a_signal_and_new_requests_are_turned_away(start: Start, whole_group: bool) -> None:
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "20"))
    url = gateway.url
    with gateway.client() as client:
        chunks = open_stream(client, max_tokens=120)
        (gateway.signal_group if whole_group else gateway.signal)(signal.SIGTERM)
        wait_for("new requests are turned away", lambda: _is_turned_away(url))
        rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length"
    assert gateway.wait() == 0
    wait_for("every process is gone", lambda: not gateway.family())


def _is_turned_away(url: str) -> bool:
    try:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=10)
    except httpx.TransportError:
        return True
    return answer.status_code == 503


def test_a_second_signal_does_not_wait_for_streams(start: Start) -> None:
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "20"))
    with gateway.client() as client:
        open_stream(client, max_tokens=15_000)
        gateway.signal(signal.SIGTERM)
        time.sleep(0.3)
        gateway.require_running()
        gateway.signal(signal.SIGTERM)
        gateway.wait()
    wait_for("every process is gone", lambda: not gateway.family())


def test_workers_end_when_the_gateway_is_killed(start: Start) -> None:
    gateway = start(*serve_arguments("fake"))
    family = gateway.family()
    gateway.signal(signal.SIGKILL)
    wait_for("every process is gone", lambda: not any(is_alive(process) for process in family))


# --- death


@pytest.mark.parametrize("part", ["head", "rank"])
def test_a_killed_worker_is_a_pause_until_it_is_started_again(start: Start, part: str) -> None:
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "10"))
    before = answer_of(gateway)
    undisturbed = raw_stream(gateway, lambda: None, 100)
    victim = gateway.worker_head() if part == "head" else gateway.worker_rank()
    old = [gateway.worker_head(), gateway.worker_rank()]
    lines = raw_stream(gateway, victim.kill, 100)
    assert lines[-1] == "[DONE]"
    assert text_of(lines) == text_of(undisturbed)
    wait_for("the old worker is gone, all of it", lambda: not any(is_alive(process) for process in old))
    wait_for("a new worker runs", gateway.is_ready)
    assert answer_of(gateway) == before
    gateway.wait_until_idle()


def test_a_worker_that_somebody_else_ends_finishes_and_is_followed_by_another(start: Start) -> None:
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "10"))
    before = answer_of(gateway)
    old = gateway.worker_head()
    lines = raw_stream(gateway, old.terminate, 100)
    assert lines[-1] == "[DONE]"
    metrics = gateway.metrics()
    assert metrics["baleen_request_replays_total"] == metrics["baleen_request_retries_total"] == 0
    wait_for("the old worker is gone", lambda: not is_alive(old))
    wait_for("a new worker runs", gateway.is_ready)
    assert answer_of(gateway) == before


def test_a_collected_answer_is_whole_though_its_worker_was_killed(start: Start) -> None:
    gateway = start(*serve_arguments("fake", "--fake-step-ms", "10"))

    async def run() -> None:
        async with gateway.async_client() as client:
            request = asyncio.create_task(
                client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=300, extra_body={"ignore_eos": True}
                )
            )
            running = "baleen_worker_running_requests"
            await asyncio.to_thread(wait_for, "the request runs", lambda: gateway.metrics().get(running) == 1)
            gateway.worker_head().kill()
            usage = (await request).usage
            assert usage is not None
            assert usage.completion_tokens == 300

    asyncio.run(run())
    wait_for("the gateway is ready again", gateway.is_ready)
    assert answer_of(gateway)


def test_a_worker_that_dies_again_and_again_is_restarted_with_pauses(start: Start) -> None:
    gateway = start(*serve_arguments("fake"))
    for _ in range(2):
        head = gateway.worker_head()
        head.kill()
        wait_for("the old worker is gone", lambda head=head: not is_alive(head))
        wait_for("a new worker runs", gateway.is_ready)
    assert answer_of(gateway)


def test_nothing_is_left_in_the_temporary_folder(start: Start, tmp_path: Path) -> None:
    """Sockets between head and rank are removed when the stack ends."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    with Gateway(*serve_arguments("fake"), env={"TMPDIR": str(folder)}) as gateway:
        assert answer_of(gateway.ready())
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    assert not [path for path in folder.rglob("*") if not path.is_dir()]
