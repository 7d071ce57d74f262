"""The head process: starts the rank, serves gRPC, reports to whoever supervises it, and ends everything together.

Lifecycle, all of it here: the port is bound before the model is loaded; with `--supervised`, events go to stdout as
JSON lines and the end of stdin ends the worker; SIGTERM or SIGINT drains; the rank's death ends the head. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baleen_worker.access import KeyCheck
from baleen_worker.assignment import Assignment
from baleen_worker.config import ConfigError, LaunchConfig
from baleen_worker.keys import read_key
from baleen_worker.kv_events import KvEventPublisher
from baleen_worker.limits import model_facts
from baleen_worker.messages import Fatal, Flushed, Loading, PeerTried, Ready, StepDone, Surveyed
from baleen_worker.model_config import ModelConfig, load_model_config
from baleen_worker.pb import worker_pb2 as pb
from baleen_worker.reporting import LoadingLine, report
from baleen_worker.server import PROTOCOL_VERSION, SERVICE_NAME, WorkerService, WorkerState
from baleen_worker.streams import StreamEndedError, Streams
from baleen_worker.wire import HeadEnd

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_FLUSH_S = 0.5
_RANK_EXIT_S = 0.3
_EXIT_AT_LATEST_S = 0.8
_LAST_WORDS_S = 0.25

logger = logging.getLogger(__name__)


class FatalError(Exception):
    """The worker cannot start or go on; the message is the one sentence for the operator."""


def run(config: LaunchConfig) -> int:
    """Serves until told to stop. Returns the exit status; raises FatalError or ConfigError."""
    # The rank inherits this and is never touched by a terminal's Ctrl-C; the loop installs its own handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return asyncio.run(_Head(config).run())


class _Head:
    def __init__(self, config: LaunchConfig) -> None:
        self._model = _read_model(config)
        self._config = config = fit_to_model(config, self._model)
        self._state = WorkerState(
            boot_epoch=secrets.randbits(64),
            files=_tokenizer_files(config.worker.model_dir),
            page_size=config.worker.page_size,
        )
        self._kv_events: KvEventPublisher | None = None
        self._streams = Streams()
        self._rank_end = HeadEnd()
        self._service = WorkerService(self._state, self._streams, self._rank_end)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] - the stub leaves it out
        self._stop = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        key_file = self._config.head.key_file
        check = None if key_file is None else KeyCheck(read_key(key_file, "--worker-key-file"))
        server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[] if check is None else [check])
        try:
            address = await self._listen(server)
            self._watch_metrics(check)
            self._publish_kv_events()
            self._watch_signals()
            if self._config.head.supervised:
                report("listening", address=address)
                self._watch_stdin()
            else:
                logger.info("listening on %s", address)
            await self._serve_until_stopped()
        finally:
            for task in self._background:
                task.cancel()
            await server.stop(grace=None)
            if self._kv_events is not None:
                self._kv_events.close()
            self._rank_end.close()
        return 0

    # --- start ----------------------------------------------------------------------------------------------------

    async def _listen(self, server: grpc.aio.Server) -> str:
        head = self._config.head
        server.add_generic_rpc_handlers((self._service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._set_health(serving=False)
        host = f"[{head.host}]" if ":" in head.host else head.host
        try:
            port = server.add_insecure_port(f"{host}:{head.port}")
        except RuntimeError:
            message = f"cannot listen on {host}:{head.port}: another process has the port, or the address is not ours"
            raise FatalError(message) from None
        await server.start()
        return f"{host}:{port}"

    async def _start_rank(self) -> asyncio.subprocess.Process:
        rank = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baleen_worker.rank",
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # stdout is the supervisor's
        )
        assert rank.stdin is not None, "the rank was given a pipe"
        assignment = Assignment(
            worker=self._config.worker,
            socket_path=self._rank_end.path,
            head_pid=os.getpid(),
            vocab_size=self._model.vocab_size,
            eos_token_ids=tuple(self._model.eos_token_ids),
            boot_epoch=self._state.boot_epoch,
        )
        rank.stdin.write(assignment.encode())
        return rank

    def _became_ready(self, ready: Ready) -> None:
        config = self._config
        pages = ready.capacity_pages
        # A request must fit when it runs alone, so a context that the pool cannot hold does not exist.
        assert config.worker.context_length is not None, "the configuration was not fitted to the model"
        context_length = min(config.worker.context_length, pages * config.worker.page_size)
        try:
            self._state.model = facts = model_facts(self._model, config.worker, context_length)
        except ValueError as error:
            raise FatalError(str(error)) from None
        tokenizer = self._state.files.get(pb.TOKENIZER_FILE_TOKENIZER)
        self._state.info = pb.GetInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            boot_epoch=self._state.boot_epoch,
            model_id=config.head.model_id,
            config_digest=self._model.config_digest,
            model_type=self._model.model_type,
            role=facts.role.value,  # pyright: ignore[reportArgumentType] - plain numbers
            topology=pb.ParallelTopology(
                tp_size=1, dp_size=1, ep_size=1, pp_size=1, cp_size=1, num_nodes=1, node_rank=0
            ),
            layout_id=ready.layout_id,
            page_size_tokens=config.worker.page_size,
            capacity_pages=pages,
            context_length_tokens=context_length,
            vocab_size=self._model.vocab_size,
            tokenizer_sha256=_sha256(tokenizer) if tokenizer is not None else "",
            max_running_requests=config.worker.max_running_requests,
            worker_version=_version(),
            dtype=ready.dtype,
            device=ready.device,
            eos_token_ids=self._model.eos_token_ids,
            features=[*facts.features, *ready.features],
        )
        if ready.transfer_address is not None:
            self._state.info.transfer_endpoints.add(backend="tcp", address=ready.transfer_address, dp_rank=0)
        facts = {
            "device": ready.device,
            "dtype": ready.dtype,
            "capacity_pages": pages,
            "page_size_tokens": config.worker.page_size,
            "context_length_tokens": context_length,
            "weights_bytes": ready.weights_bytes,
            "kv_bytes": ready.kv_bytes,
            "load_seconds": round(ready.load_seconds, 3),
        }
        if config.head.supervised:
            report("ready", **facts)
        else:
            logger.info("ready: %s", ", ".join(f"{name} {value}" for name, value in facts.items()))

    # --- while it runs --------------------------------------------------------------------------------------------

    async def _serve_until_stopped(self) -> None:
        rank = await self._start_rank()
        news = asyncio.create_task(self._relay())
        watch = asyncio.create_task(self._streams.watch(self._service.load_report))
        died = asyncio.create_task(rank.wait())
        stopped = asyncio.create_task(self._stop.wait())
        tasks = (news, watch, died, stopped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await self._end_streams("the worker has shut down")
                return
            if died.done():  # let what it said last arrive
                await asyncio.wait((news,), timeout=_LAST_WORDS_S)
            failure = _failure_of(news) or _failure_of(watch) or f"the rank process died {_how(await rank.wait())}"
            await self._set_health(serving=False)
            # The end of a stream says of its requests that this worker is lost: another one may take them over.
            await self._end_streams(failure)
            raise FatalError(failure)
        finally:
            for task in tasks:
                task.cancel()
            await _end_rank(rank)

    async def _relay(self) -> None:
        """Passes the rank's news on, until it says something fatal."""
        loading = LoadingLine(supervised=self._config.head.supervised)
        while True:
            event = await self._rank_end.receive()
            match event:
                case StepDone():
                    self._service.on_step(event)
                    if self._kv_events is not None and event.cache_events:
                        await self._kv_events.publish(event.cache_events)
                    await asyncio.sleep(0)  # a rank that is ahead must not keep the streams from being written
                    if self._state.draining:
                        self._stop_when_drained()
                case Flushed():
                    self._service.on_flushed(event)
                case Surveyed():
                    self._service.on_surveyed(event)
                case PeerTried():
                    self._service.on_peer_tried(event)
                case Loading(done_bytes, total_bytes):
                    loading.show(done_bytes, total_bytes)
                case Ready():
                    loading.finish()
                    self._rank_end.forget_path()
                    self._became_ready(event)
                    await self._set_health(serving=not self._state.draining)
                case Fatal(message):
                    loading.finish()
                    raise FatalError(message)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _watch_metrics(self, check: KeyCheck | None) -> None:
        head = self._config.head
        if head.metrics_port is None:
            return
        from baleen_worker.metrics import serve_metrics  # only when it is asked for

        def num_refused() -> int:
            return 0 if check is None else check.num_refused

        try:
            serve_metrics(head.host, head.metrics_port, head.model_id, lambda: self._state.load, num_refused)
        except OSError as error:
            raise FatalError(f"cannot serve metrics on port {head.metrics_port}: {error.strerror}") from None

    def _publish_kv_events(self) -> None:
        kv_events = self._config.head.kv_events
        if kv_events is None or not kv_events.enabled:
            return
        try:
            self._kv_events = KvEventPublisher(kv_events, self._config.worker.page_size)
        except ValueError as error:
            raise FatalError(str(error)) from None
        self._background.append(asyncio.create_task(self._kv_events.serve_replays()))

    # --- end ------------------------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._state.draining:
            logger.info("draining: %d requests in flight", self._streams.num_live)
            self._service.drain()
            self._background.append(asyncio.create_task(self._set_health(serving=False)))
            self._stop_when_drained()
        elif not self._config.head.supervised:
            os._exit(1)

    def _stop_when_drained(self) -> None:
        """A supervised worker waits for its supervisor to close the pipe; any other one is done."""
        if not self._config.head.supervised and self._streams.num_live == 0:
            self._stop.set()

    def _watch_stdin(self) -> None:
        loop = asyncio.get_running_loop()

        def watch() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._stop.set)
            time.sleep(_EXIT_AT_LATEST_S)
            os._exit(0)

        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()

    async def _end_streams(self, message: str) -> None:
        await self._streams.close_all(StreamEndedError(grpc.StatusCode.UNAVAILABLE, message), _FLUSH_S)


_SERVER_OPTIONS = (
    # Without this a second worker on the same port would silently take half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A gateway that vanished without a word is noticed within 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


async def _end_rank(rank: asyncio.subprocess.Process) -> None:
    """Closes the rank's pipe, which ends it; kills it when it does not notice."""
    assert rank.stdin is not None, "the rank was given a pipe"
    rank.stdin.close()
    try:
        async with asyncio.timeout(_RANK_EXIT_S):
            await rank.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            rank.kill()
        await rank.wait()


def _failure_of(task: asyncio.Task[None]) -> str | None:
    """Why a task that should run for ever has ended; None while it runs."""
    error = task.exception() if task.done() else None
    if error is None or isinstance(error, FatalError):
        return None if error is None else str(error)
    logger.error("the head fails", exc_info=error)
    return f"the head failed: {type(error).__name__}: {error}"


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit status {returncode}"
    return f"of signal {-returncode} ({signal.Signals(-returncode).name})"


def _read_model(config: LaunchConfig) -> ModelConfig:
    try:
        return load_model_config(config.worker.model_dir, config.worker.model_overrides)
    except ValueError as error:
        raise FatalError(str(error)) from None


def fit_to_model(config: LaunchConfig, model: ModelConfig) -> LaunchConfig:
    """The configuration with the numbers that depend on the model filled in."""
    worker = config.worker
    longest = model.max_position_embeddings
    context_length = worker.context_length or longest
    if context_length > longest:
        raise ConfigError(f"--context-length {context_length} exceeds what the model was made for, {longest} tokens")
    chunk = worker.chunked_prefill_size
    if chunk < 0:  # any prompt, and every decode beside it
        chunk = context_length + worker.max_running_requests
    return replace(config, worker=replace(worker, context_length=context_length, chunked_prefill_size=chunk))


def _version() -> str:
    try:
        return metadata.version("baleen")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "checkout"


def _tokenizer_files(model_dir: Path) -> dict[int, Path]:
    """Files that a gateway may ask for, in the order in which it gets them."""
    names = {
        pb.TOKENIZER_FILE_TOKENIZER: "tokenizer.json",
        pb.TOKENIZER_FILE_TOKENIZER_CONFIG: "tokenizer_config.json",
        pb.TOKENIZER_FILE_MODEL_CONFIG: "config.json",
    }
    return {int(kind): model_dir / name for kind, name in names.items() if (model_dir / name).is_file()}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
