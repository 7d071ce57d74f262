"""Where constrained requests wait until their grammar is compiled, off the step loop. Owned by the engine.

Owns the cache of compiled grammars, the threads that fill it, and every request that has not reached the scheduler yet;
an abort, a deadline or the end of a stream finds it here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from baleen_worker.grammar.guide import Guide, GuideError, TokenMatcher
from baleen_worker.output import Output, RequestError
from baleen_worker.request import Constraint, ErrorCode, FinishReason, Request, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

MAX_WAITING = 1024
_NUM_THREADS = 2
# Of a constraint's time: as much again goes to the repetition in the rank, and what is left to getting there and back.
_TRIAL_SHARE = 0.4
_MAX_REFUSALS = 256

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """A constraint that is not served; the message says why."""


class Compiler(Protocol):
    """Turns constraints into grammars. Called from several threads."""

    def compile(self, constraint: Constraint) -> Any:
        """A grammar, with its size as `memory_size_bytes`. Raises RefusedError."""
        ...

    def match(self, grammar: Any, stop_ids: Sequence[int]) -> TokenMatcher:
        """A matcher at the grammar's beginning."""
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request whose grammar is ready, and when it arrived."""

    request: Request
    arrival_ms: float
    guide: Guide


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    arrival_ms: float
    guide: Future[Guide]


class GrammarRoom:
    """Requests whose grammar is being compiled."""

    def __init__(self, make_compiler: Callable[[], Compiler], *, cache_bytes: int) -> None:
        """`make_compiler` is called in a thread at the first request; it may take seconds."""
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()
        self._cache = _GrammarCache(cache_bytes)
        self._compiling = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._masking = ThreadPoolExecutor(_NUM_THREADS, "mask")
        self._waiting: dict[RequestId, _Waiting] = {}
        self._news = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request, now_ms: float) -> Output | None:
        """Takes a request with a constraint in. Returns an output when it is refused."""
        if request.id in self._waiting:
            return _failed(request, ErrorCode.INVALID_ARGUMENT, "the key names a request that still runs", "key")
        if len(self._waiting) >= MAX_WAITING:
            message = f"{MAX_WAITING} constraints are waiting to be compiled: retry later or on another worker"
            return _failed(request, ErrorCode.RESOURCE_EXHAUSTED, message)
        guide = self._compiling.submit(self._prepare, request)
        guide.add_done_callback(lambda _: self._news.set())
        self._waiting[request.id] = _Waiting(request, now_ms, guide)
        return None

    def leave(self) -> tuple[list[Admitted], list[Output]]:
        """Requests that are ready for the scheduler, and the ends of those that cannot be served."""
        admitted: list[Admitted] = []
        outputs: list[Output] = []
        for waiting in [waiting for waiting in self._waiting.values() if waiting.guide.done()]:
            request = waiting.request
            del self._waiting[request.id]
            error = waiting.guide.exception()
            if error is None:
                admitted.append(Admitted(request, waiting.arrival_ms, waiting.guide.result()))
            elif isinstance(error, RefusedError):
                outputs.append(_failed(request, ErrorCode.INVALID_ARGUMENT, str(error), _field(request)))
            else:
                logger.error("a constraint could not be compiled", exc_info=error)
                message = f"the constraint could not be compiled ({type(error).__name__}); the worker's log says more"
                outputs.append(_failed(request, ErrorCode.INTERNAL, message, _field(request)))
        return admitted, outputs

    def abort(self, request_id: RequestId) -> Output | None:
        """Ends a request that waits here; None when it does not."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        waiting.guide.cancel()
        return Output(request_id, finish_reason=FinishReason.ABORT)

    def abort_stream(self, stream: int) -> None:
        """Ends every request of one Connect stream."""
        for request_id in [request_id for request_id in self._waiting if request_id[0] == stream]:
            self.abort(request_id)

    def expire(self, now_ms: float) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        outputs: list[Output] = []
        for waiting in list(self._waiting.values()):
            deadline_ms = waiting.request.deadline_ms
            if deadline_ms is not None and now_ms >= waiting.arrival_ms + deadline_ms:
                self.abort(waiting.request.id)
                message = f"not finished within {deadline_ms} ms of its arrival"
                outputs.append(_failed(waiting.request, ErrorCode.DEADLINE_EXCEEDED, message, "deadline_ms"))
        return outputs

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a grammar or a mask is ready, or the time is over."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """Ends threads and processes; what waits here is forgotten."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    # --- in the threads -------------------------------------------------------------------------------------------

    def _prepare(self, request: Request) -> Guide:
        constraint = request.constraint
        assert constraint is not None, "a request without a constraint has nothing to wait for"
        compiler = self._get_compiler()
        grammar = self._cache.get(constraint, compiler.compile)
        sampling = request.sampling
        guide = Guide(
            compiler.match(grammar, sampling.stop_token_ids),
            stop_ids=sampling.stop_token_ids,
            after_id=constraint.after_id,
            min_tokens=sampling.min_tokens,
            defer=self._defer,
        )
        try:
            guide.catch_up(request.resumed_token_ids)
        except GuideError:
            raise RefusedError("resumed_token_ids: they do not match it, so they are not an answer to it") from None
        return guide

    def _get_compiler(self) -> Compiler:
        with self._compiler_lock:
            if self._compiler is None:
                with _short_turns():
                    self._compiler = self._make_compiler()
            return self._compiler

    def _defer(self, make_mask: Callable[[], bytes]) -> Future[bytes]:
        mask = self._masking.submit(make_mask)
        mask.add_done_callback(lambda _: self._news.set())
        return mask


class TriedCompiler:
    """xgrammar, after a trial in another process that may fail at no cost; see `trial.py`."""

    def __init__(self, model_dir: Path, vocab_size: int, *, limit_s: float, num_threads: int) -> None:
        """`limit_s`: processor time of a constraint, for the trial and the repetition together."""
        from baleen_worker.grammar.trial import TrialServer

        self._limit_s = limit_s
        self._server = TrialServer(model_dir, vocab_size, num_threads)
        from baleen_worker.grammar.backend import Backend  # takes seconds, in which the server imports the same

        self._backend = Backend(model_dir, vocab_size, num_threads)

    def compile(self, constraint: Constraint) -> Any:
        """See `Compiler`."""
        verdict = self._server.judge(constraint, self._limit_s * _TRIAL_SHARE)
        if verdict is None:
            raise RefusedError(
                f"it is too large to compile within {self._limit_s:g} s of processor time: ask for less depth, fewer "
                "alternatives or smaller bounds"
            )
        if verdict.error is not None:
            raise RefusedError(verdict.error)
        return self._backend.compile(constraint)

    def match(self, grammar: Any, stop_ids: Sequence[int]) -> TokenMatcher:
        """See `Compiler`."""
        return self._backend.match(grammar, stop_ids)

    def close(self) -> None:
        """See `Compiler`."""
        self._server.close()


class _GrammarCache:
    """Compiled grammars up to a number of bytes, the least recently used going first, and the latest refusals."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._refusals: OrderedDict[tuple[str, str], RefusedError] = OrderedDict()
        self._under_way: dict[tuple[str, str], Future[Any]] = {}
        self._lock = threading.Lock()

    def get(self, constraint: Constraint, compile_: Callable[[Constraint], Any]) -> Any:
        """The grammar of a constraint, compiled here unless it is known or another thread is at it."""
        key = (constraint.kind, constraint.source)
        with self._lock:
            if key in self._grammars:
                self._grammars.move_to_end(key)
                return self._grammars[key]
            if key in self._refusals:
                raise self._refusals[key]
            others = self._under_way.get(key)
            mine: Future[Any] = Future()
            if others is None:
                self._under_way[key] = mine
        if others is not None:
            return others.result()
        try:
            grammar = compile_(constraint)
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
                if isinstance(error, RefusedError):
                    self._refusals[key] = error
                    if len(self._refusals) > _MAX_REFUSALS:
                        self._refusals.popitem(last=False)
            mine.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            self._grammars[key] = grammar
            self._num_bytes += _size(key, grammar)
            while self._num_bytes > self._max_bytes and len(self._grammars) > 1:
                oldest, dropped = self._grammars.popitem(last=False)
                self._num_bytes -= _size(oldest, dropped)
        mine.set_result(grammar)
        return grammar


def _size(key: tuple[str, str], grammar: Any) -> int:
    return grammar.memory_size_bytes + len(key[1])


@contextlib.contextmanager
def _short_turns() -> Generator[None]:
    """While a thread imports for seconds, the step loop gets its turn after half a millisecond, not after five."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _field(request: Request) -> str:
    return "" if request.constraint is None else request.constraint.kind


def _failed(request: Request, code: ErrorCode, message: str, field: str = "") -> Output:
    prefix = f"{field}: " if field and code is not ErrorCode.DEADLINE_EXCEEDED else ""
    return Output(request.id, error=RequestError(code, prefix + message, field))
