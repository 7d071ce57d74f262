"""A real worker process with the fake runner, and a gateway's end of its streams, for tests over a real socket."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
from baleen_worker.cache.events import page_hash, root_hash
from baleen_worker.cache.prefix import page_keys
from baleen_worker.fake_runner import expected_tokens
from baleen_worker.pb import worker_pb2 as pb

WORKER = Path(__file__).resolve().parents[2]
MODEL = WORKER.parent / "models" / "micro"
SERVICE = "/baleen.worker.v1.Worker/"
TIMEOUT_S = 120.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Polls a condition; the deadline is generous and only ends what would never end."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"still waiting until {what}"
        time.sleep(0.01)


def copy_model(folder: Path) -> Path:
    """The model folder without weights, which is all that the fake runner needs."""
    target = folder / "whale"
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, target / name)
    return target


def page_names(prompt: list[int], salt: str = "", page_size: int = 64) -> list[int]:
    """Of a prompt's whole pages, as the contract names them."""
    parent, names = root_hash(salt), list[int]()
    for start in range(0, len(prompt) - page_size + 1, page_size):
        parent = page_hash(parent, page_keys(prompt[start : start + page_size]))
        names.append(parent)
    return names


class WorkerProcess:
    """`python -m baleen_worker --runner fake`, ended at the latest with the `with` block."""

    def __init__(
        self, model_dir: Path, *arguments: str, supervised: bool = True, environment: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", "baleen_worker", str(model_dir), "--runner", "fake", "--port", "0", *arguments]
        if supervised:
            command.append("--supervised")
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command,
            cwd=WORKER,
            env=inherited | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self.stray: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            print("".join(self.errors), file=sys.stderr)
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def event(self, name: str) -> dict[str, Any]:
        """The first event of that name, once it is there; fails when the process ends before."""

        def seen() -> bool:
            return self._find(name) is not None or (self.process.poll() is not None and not self._readers[0].is_alive())

        wait_until(seen, f"the worker reports {name}")
        event = self._find(name)
        assert event is not None, f"the worker ended with {self.process.returncode} before {name}: {self.errors}"
        return event

    @property
    def address(self) -> str:
        """host:port, once the worker is ready."""
        self.event("ready")
        return self.event("listening")["address"]

    def family(self) -> list[psutil.Process]:
        """Head and rank, as far as they live."""
        try:
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def rank(self) -> psutil.Process:
        """The rank process."""
        _, rank = self.family()
        return rank

    def close_stdin(self) -> None:
        """What the supervisor's death does."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        """The head's exit status."""
        return self.process.wait(TIMEOUT_S)

    def error_lines(self) -> list[str]:
        """Lines on stderr that are for the operator, once the process has ended."""
        self._readers[1].join()
        return [line.rstrip("\n") for line in self.errors if line.startswith("error: ")]

    def _find(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == name), None)

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.events.append(json.loads(line))
            except ValueError:
                self.stray.append(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of the processes lives; a zombie that nobody reaps is dead."""
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


class Client:
    """Calls of one gateway."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.channel.close()

    def info(self) -> pb.GetInfoResponse:
        """GetInfo."""
        call = self.channel.unary_unary(
            f"{SERVICE}GetInfo", pb.GetInfoRequest.SerializeToString, pb.GetInfoResponse.FromString
        )
        return call(pb.GetInfoRequest(), timeout=TIMEOUT_S)

    def flush(self) -> pb.FlushCacheResponse:
        """FlushCache."""
        call = self.channel.unary_unary(
            f"{SERVICE}FlushCache", pb.FlushCacheRequest.SerializeToString, pb.FlushCacheResponse.FromString
        )
        return call(pb.FlushCacheRequest(), timeout=TIMEOUT_S)

    def probe(self, **fields: Any) -> pb.ProbeTransferResponse:
        """ProbeTransfer."""
        call = self.channel.unary_unary(
            f"{SERVICE}ProbeTransfer",
            pb.ProbeTransferRequest.SerializeToString,
            pb.ProbeTransferResponse.FromString,
        )
        return call(pb.ProbeTransferRequest(**fields), timeout=TIMEOUT_S)

    def files(self) -> dict[int, bytes]:
        """GetTokenizer, put together; checks chunk sizes and marks."""
        call = self.channel.unary_stream(
            f"{SERVICE}GetTokenizer", pb.GetTokenizerRequest.SerializeToString, pb.TokenizerChunk.FromString
        )
        files: dict[int, bytes] = {}
        done: set[int] = set()
        for chunk in call(pb.GetTokenizerRequest(), timeout=TIMEOUT_S):
            assert chunk.file not in done
            assert len(chunk.data) <= 256 * 1024
            files[chunk.file] = files.get(chunk.file, b"") + chunk.data
            if chunk.last:
                done.add(chunk.file)
        assert done == set(files)
        return files

    def connect(self, *, greet: bool = True) -> GatewayStream:
        """Connect."""
        stream = GatewayStream(self.channel)
        if greet:
            stream.send(hello=pb.Hello(protocol_version=1, gateway_id="test"))
            assert stream.next().HasField("welcome")
        return stream


class GatewayStream:
    """A gateway's end of one Connect stream. Frames are numbered going out and checked coming in."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[pb.GatewayFrame | None] = queue.SimpleQueue()
        self._sent = 0
        self._received = 0
        connect = channel.stream_stream(
            f"{SERVICE}Connect", pb.GatewayFrame.SerializeToString, pb.WorkerFrame.FromString
        )
        self.call: Any = connect(iter(self._outgoing.get, None))
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.errors: dict[int, pb.RequestError] = {}
        self.load = pb.LoadReport()
        self.draining = False
        self.num_steps = 0

    def send(self, *, sequence: int | None = None, **fields: Any) -> None:
        """Sends one frame."""
        self._sent += 1
        self._outgoing.put(pb.GatewayFrame(sequence=sequence or self._sent, **fields))

    def submit(self, key: int, prompt: list[int], max_tokens: int | None = None, **sampling: Any) -> None:
        """Submits one request."""
        self.send(submits=[make_submit(key, prompt, max_tokens, **sampling)])

    def half_close(self) -> None:
        """Says that no more frames come."""
        self._outgoing.put(None)

    def next(self) -> pb.WorkerFrame:
        """The next frame, entered into the record. Raises grpc.RpcError at the stream's end by error."""
        frame: pb.WorkerFrame = next(self.call)
        self._received += 1
        assert frame.sequence == self._received, "a frame was lost or doubled"
        self.draining = self.draining or frame.draining
        if frame.HasField("load"):
            self.load = frame.load
        self._enter(frame)
        return frame

    def read_until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Reads frames until the record satisfies a condition; load reports keep it from blocking for ever."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "still waiting for a frame that satisfies the condition"
            self.next()

    def read_to_end(self) -> grpc.StatusCode:
        """Reads until the stream ends; returns its status."""
        try:
            while True:
                self.next()
        except StopIteration:
            return grpc.StatusCode.OK
        except grpc.RpcError:
            return self.call.code()

    @property
    def ended(self) -> set[int]:
        """Keys that have a final row or an error."""
        return self.ends.keys() | self.errors.keys()

    def _enter(self, frame: pb.WorkerFrame) -> None:
        if frame.HasField("step"):
            assert frame.step.step >= self.num_steps, "steps go backwards"
            self.num_steps = frame.step.step
        for key, tokens, reason in rows(frame):
            assert key not in self.ended, f"a row of {key} follows its end"
            self.tokens.setdefault(key, []).extend(tokens)
            if reason:
                self.ends[key] = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
        for error in frame.errors:
            assert error.key not in self.ended
            self.errors[error.key] = error


def rows(frame: pb.WorkerFrame) -> Iterator[tuple[int, list[int], int]]:
    """(key, tokens, finish reason) of each row of a frame."""
    step = frame.step
    start = 0
    assert len(step.keys) == len(step.token_counts) == len(step.finish_reasons) == len(step.cached_tokens)
    for key, count, reason in zip(step.keys, step.token_counts, step.finish_reasons, strict=True):
        yield key, list(step.token_ids[start : start + count]), reason
        start += count
    assert start == len(step.token_ids)


def make_submit(key: int, prompt: list[int], max_tokens: int | None = None, **sampling: Any) -> pb.Submit:
    """A Submit as a gateway would send it."""
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    return pb.Submit(
        key=key, request_id=key.to_bytes(16, "big"), prompt_token_ids=prompt, sampling=pb.Sampling(**sampling)
    )


def answer_to(info: pb.GetInfoResponse, prompt: list[int], num_tokens: int) -> list[int]:
    """What the worker's fake runner must answer."""
    return expected_tokens(prompt, num_tokens, info.vocab_size, avoid_ids=info.eos_token_ids)
