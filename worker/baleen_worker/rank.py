"""The rank process: builds the runner and turns the engine. Started by the head alone, as `-m baleen_worker.rank`.

Its standard input is a pipe from the head. The first line is the assignment; the pipe then stays silent, and when it
closes the head is gone and the rank ends itself. Signals from a terminal are the head's to handle.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from baleen_worker import last_words
from baleen_worker.assignment import Assignment
from baleen_worker.cache.host import HostTier, WritePolicy
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.config import WorkerConfig
from baleen_worker.disaggregation_flags import KEY_FLAG
from baleen_worker.engine import Engine, Inbox, Outbox
from baleen_worker.fake_runner import build_fake_runner
from baleen_worker.fake_script import FakeScript
from baleen_worker.grammar.room import GrammarRoom, TriedCompiler
from baleen_worker.keys import read_key
from baleen_worker.messages import Fatal, Loading, Ready
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.transfer.actions import Timers
from baleen_worker.transfer.couriers import Couriers
from baleen_worker.transfer.lending import Backend, Lender, LoanError
from baleen_worker.transfer.reading import Reading
from baleen_worker.transfer.tcp import TcpTransfer
from baleen_worker.transfer.wire import Identity
from baleen_worker.waiting import Policy
from baleen_worker.watchdog import WatchedRunner
from baleen_worker.wire import RankEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baleen_worker.config import DisaggregationConfig
    from baleen_worker.step import BuiltRunner, PageStore

_PR_SET_PDEATHSIG = 1
_PROGRESS_INTERVAL_S = 0.2
_MAX_GRAMMAR_THREADS = 8
_SWITCH_S = 0.0005

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs until the head goes away (exit 0, at once) or something fatal happens (exit 1, after telling the head)."""
    last_words.crash_clearly()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Unbuffered, so that nothing but the assignment is read here and the watcher sees the end of the pipe.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        assignment = Assignment.decode(pipe.readline())
    _die_with_head(assignment.head_pid)
    logging.basicConfig(
        level=assignment.worker.log_level.upper(),
        format="%(asctime)s %(levelname)s rank: %(message)s",
        stream=sys.stderr,
    )
    end = RankEnd(assignment.socket_path)
    engine = None
    try:
        engine = start_engine(assignment, end, inbox=(end.fileno(),), on_stall=lambda last: _end_at_once(end, last))
        engine.run()
    except Exception as error:
        # A start that fails is explained by its sentence; afterwards only our own mistakes and broken devices end here.
        logger.log(logging.DEBUG if engine is None else logging.ERROR, "the rank ends", exc_info=True)
        _end_at_once(end, _sentence(error))
    end.close()
    return 1


class End(Inbox, Outbox, Protocol):
    """Both directions to whoever drives the engine."""


def start_engine(
    assignment: Assignment, end: End, *, inbox: Sequence[int] = (), on_stall: Callable[[str], None] | None = None
) -> Engine:
    """Builds runner and scheduler, tells `end` that they are ready, and returns the engine, not yet running.

    `inbox`: files that become readable when commands come. `on_stall`: ends the process, see `watchdog`; without it, a
    step may take as long as it likes.

    Raises ValueError, with a sentence for the operator, for what the model folder, device or memory does not allow.
    """
    config = assignment.worker
    started_s = time.monotonic()
    built = _build(assignment, end)
    pages = PagePool(built.num_pages, on_free=built.poison if config.poison_freed_pages else None)
    scheduler = _scheduler(config, built, pages)
    transfer = _transfer(assignment, built, pages, inbox)
    # Nothing built so far will ever be garbage: collections need not look at it again.
    gc.collect()
    gc.freeze()
    end.publish(
        Ready(
            device=built.device,
            dtype=built.dtype,
            layout_id=built.layout_id,
            capacity_pages=built.num_pages - 1,
            weights_bytes=built.weights_bytes,
            kv_bytes=built.kv_bytes,
            load_seconds=time.monotonic() - started_s,
            features=built.features,
            transfer_address=_advertised(config, transfer),
        )
    )
    overlaps = built.computes_beside and not config.disable_overlap_schedule
    depth = 2 if overlaps else 1
    room = _grammar_room(assignment)
    runner, on_broken = built.runner, lambda: None
    if on_stall is not None:
        runner = watched = WatchedRunner(
            runner,
            limit_s=config.watchdog_timeout_s,
            features=built.features,
            on_stall=on_stall,
            owns_process=True,
        )
        on_broken = watched.log_record

        def on_exit() -> None:
            watched.log_record()
            on_stall(_why_a_library_ends(built.device))

        last_words.before_exit(on_exit)
    return Engine(scheduler, runner, end, end, depth=depth, room=room, transfer=transfer, on_broken=on_broken)


def _end_at_once(end: RankEnd, sentence: str) -> NoReturn:
    """Gives nothing back: memory of a device that is lost cannot be.

    Also for a thread beside the engine's, which is then inside the runner and so uses no socket.
    """
    end.publish(Fatal(sentence))
    end.close()
    os._exit(1)


def _why_a_library_ends(device: str) -> str:
    """Kernel libraries do when CUDA returns an error, which is then the device's answer to everything."""
    if device.startswith("cuda"):
        import torch

        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return f"the device is lost: {' '.join(str(error).split())}"
    return "a library has ended the process that computes"


def _advertised(config: WorkerConfig, transfer: TcpTransfer | None) -> str | None:
    """Where decode workers are told to read pages, if any are to be read here."""
    if transfer is None or transfer.address is None or config.disaggregation is None:
        return None
    return config.disaggregation.advertised or transfer.address


def _transfer(assignment: Assignment, built: BuiltRunner, pages: PagePool, inbox: Sequence[int]) -> TcpTransfer | None:
    """What moves pages between this worker and others, where there are others."""
    config = assignment.worker.disaggregation
    if config is None:
        return None
    assert built.page_store is not None, "the runner's pages cannot be read"
    secret = b"" if config.key_file is None else read_key(config.key_file, KEY_FLAG)
    # The engine's thread and the transfer's share an interpreter: neither may keep the other waiting for long.
    sys.setswitchinterval(_SWITCH_S)
    device = built.page_store.device
    layout_id = built.layout_id if device is None else f"{built.layout_id};digest={device.digest}"
    reading = _reading(config, built.page_store)
    try:
        return TcpTransfer(
            built.page_store,
            pages.generation,
            Identity(layout_id, assignment.boot_epoch, secret),
            Timers(config.progress_s, config.lease_s),
            vocab_size=assignment.vocab_size,
            listen=(config.host, config.port) if config.prefills else None,
            inbox=inbox,
            reading=reading,
        )
    except OSError as error:
        raise ValueError(
            f"pages cannot be served on {config.host}:{config.port} ({error.strerror}): "
            "choose another --disaggregation-bootstrap-port, or 0 for any"
        ) from None


def _reading(config: DisaggregationConfig, store: PageStore) -> Reading:
    """How pages of other workers are read, and whether theirs may be read here."""
    if config.backend is Backend.TCP:
        return Reading()
    try:
        return Reading(config.backend, _lender(config, store))
    except LoanError as error:
        if config.backend is not Backend.AUTO:
            raise ValueError(
                f"--disaggregation-transfer-backend {config.backend.value} cannot be honoured: {error}"
            ) from None
        logger.info("pages travel over TCP: %s", error)
        return Reading(config.backend)


def _lender(config: DisaggregationConfig, store: PageStore) -> Lender | Couriers:
    """What a backend needs is looked for when that backend is asked for. Raises LoanError."""
    if config.backend is Backend.NIXL:
        couriers = Couriers(config.devices)
        couriers.try_out()
        return couriers
    from baleen_worker.transfer.cuda_ipc import CudaIpc

    return CudaIpc(store)


def _grammar_room(assignment: Assignment) -> GrammarRoom:
    """Starts nothing and reads nothing before the first request with a constraint comes."""
    config = assignment.worker

    def make_compiler() -> TriedCompiler:
        return TriedCompiler(
            config.model_dir,
            assignment.vocab_size,
            limit_s=config.constraint_compile_ms / 1000,
            num_threads=max(min(len(os.sched_getaffinity(0)) // 2, _MAX_GRAMMAR_THREADS), 1),
        )

    return GrammarRoom(make_compiler, cache_bytes=config.constraint_cache_mib << 20)


def _scheduler(config: WorkerConfig, built: BuiltRunner, pages: PagePool) -> Scheduler:
    limits = SchedulerLimits(
        max_running_requests=config.max_running_requests,
        max_step_tokens=config.chunked_prefill_size,
        max_queued_requests=config.max_queued_requests,
        page_size=config.page_size,
        policy=Policy(config.schedule_policy),
        conservativeness=config.schedule_conservativeness,
        preemption_threshold=config.priority_scheduling_preemption_threshold,
    )
    if config.disable_radix_cache:
        return Scheduler(limits, pages)
    max_tokens = config.radix_cache_max_tokens
    max_idle_pages = None if max_tokens is None else max_tokens // config.page_size
    host = None
    if config.host_cache is not None:
        host = HostTier(built.num_host_pages, WritePolicy(config.host_cache.write_policy))
    return Scheduler(limits, pages, PrefixCache(pages, max_idle_pages=max_idle_pages, host=host))


def _build(assignment: Assignment, end: End) -> BuiltRunner:
    config = assignment.worker
    if config.runner == "fake":
        script = config.fake.script
        return build_fake_runner(
            vocab_size=assignment.vocab_size,
            avoid_ids=assignment.eos_token_ids,
            max_total_tokens=config.max_total_tokens,
            step_ms=config.fake.step_ms,
            poison_token_id=config.fake.poison_token_id,
            deadly_token_id=config.fake.deadly_token_id,
            script=None if script is None else FakeScript.load(script, assignment.vocab_size),
            host_ratio=0.0 if config.host_cache is None else config.host_cache.ratio,
        )
    from baleen_worker.runner import build_runner  # imports torch, which the fake runner does without

    last_s = float("-inf")

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_INTERVAL_S or done_bytes == total_bytes:
            last_s = now_s
            end.publish(Loading(done_bytes, total_bytes))

    return build_runner(config, on_progress=report)


def _die_with_head(head_pid: int) -> None:
    """Two ways, because each has a gap: the pipe needs this process to get to run, the signal needs Linux."""
    threading.Thread(target=_exit_at_end_of_input, name="head-watch", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != head_pid:  # it died before the request was made
            os._exit(0)


def _exit_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def _sentence(error: Exception) -> str:
    """What an operator is told: our own errors speak for themselves, others need their type."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"PyTorch is not installed for {sys.executable}: run `{sys.executable} -m pip install torch`"
    if type(error).__module__.startswith("baleen_worker") or type(error) is ValueError:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
