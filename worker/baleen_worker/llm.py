"""Generation without a server: `LLM` runs the engine of a worker in this process, for batch work and research.

It owns a thread that turns the engine, and the inbox and outbox between that thread and the callers. Requests are
checked by the same code as a gateway's, so every field of the contract's `Sampling` means here what it means there.
Prompts are token ids or plain text; chat formatting stays in the gateway (`gateway render` prints the ids of a
conversation).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from google.protobuf.json_format import ParseDict, ParseError

from baleen_worker.assignment import Assignment
from baleen_worker.command_line import parse
from baleen_worker.head import fit_to_model
from baleen_worker.limits import InvalidSubmitError, model_facts, to_request
from baleen_worker.messages import Abort, Command, Event, LogprobColumns, StepDone, StreamColumns, Submit
from baleen_worker.model_config import load_model_config
from baleen_worker.pb import worker_pb2 as pb
from baleen_worker.rank import start_engine
from baleen_worker.request import FinishReason, Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from baleen_worker.output import RequestError

Prompt = str | Sequence[int]
Params = Mapping[str, Any]
OnTokens = Callable[[list[int]], object]

logger = logging.getLogger(__name__)

_STREAM = 0  # of request ids: Connect streams are numbered from 1
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")


class RequestFailedError(RuntimeError):
    """The engine could not finish a request; `error` says which field is at fault, if any is."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability before any sampling change, and the likeliest (id, log-probability) pairs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


@dataclass(slots=True)
class Completion:
    """What a prompt was continued with. `text` is "" for a model folder without tokenizer.json."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])


class LLM:
    """A model that is ready to generate. Use it as a context manager, or call `close`.

    `options` are the worker's launch flags with underscores (`dtype="bfloat16"`, `max_total_tokens=65536`).
    Raises ValueError, with one sentence, for a folder or an option that cannot be used.
    """

    def __init__(self, model_dir: str | Path, **options: object) -> None:
        launch = parse([str(model_dir), *_flags(options)])
        model = load_model_config(launch.worker.model_dir, launch.worker.model_overrides)
        worker = fit_to_model(launch, model).worker
        self._facts = model_facts(model, worker, worker.context_length or 0)
        self._tokenizer = _tokenizer(worker.model_dir)
        self._post = _Post()
        self._keys = itertools.count(1)
        assignment = Assignment(
            worker=worker,
            socket_path=Path(),
            head_pid=0,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        engine = start_engine(assignment, self._post)
        self._thread = threading.Thread(target=self._post.run, args=(engine.run,), name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine; requests that still run fail."""
        self._post.close()
        self._thread.join()

    def generate(self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None = None) -> list[Completion]:
        """Continues every prompt; returns completions in the order of the prompts.

        `params`: fields of the contract's `Sampling`, besides `json_schema`, `regex`, `ebnf`, `structural_tag`,
        `priority`, `cache_salt` and `deadline_ms`; one mapping for all prompts or one for each.
        Raises ValueError before anything is queued when a prompt or a field is wrong, RequestFailedError when a
        request fails later; the others are aborted then.
        """
        jobs = self._submit(prompts, params)
        try:
            return [job.done.result() for job in jobs]
        finally:
            self._post.abort(jobs)

    async def agenerate(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[Completion]:
        """`generate` for asyncio; cancelling it aborts its requests."""
        jobs = self._submit(prompts, params)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
        finally:
            self._post.abort(jobs)

    async def astream(self, prompt: Prompt, params: Params | None = None) -> AsyncIterator[list[int]]:
        """The token ids of one prompt's continuation, as steps produce them. Leaving the loop aborts the request."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[list[int]] = asyncio.Queue()
        jobs = self._submit([prompt], params, lambda ids: loop.call_soon_threadsafe(pieces.put_nowait, ids))
        done = asyncio.wrap_future(jobs[0].done)
        try:
            while not (done.done() and pieces.empty()):
                piece = asyncio.ensure_future(pieces.get())
                await asyncio.wait({piece, done}, return_when=asyncio.FIRST_COMPLETED)
                if piece.done():
                    yield piece.result()
                else:
                    piece.cancel()
            await done
        finally:
            self._post.abort(jobs)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; what looks like a control token stays text."""
        if self._tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: give token ids instead of text")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(token_ids))

    def _submit(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None, on_tokens: OnTokens | None = None
    ) -> list[_Job]:
        if isinstance(prompts, str):
            raise ValueError("prompts is one string: give a list of prompts")
        each = [params or {}] * len(prompts) if params is None or isinstance(params, Mapping) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params were given for {len(prompts)} prompts: give one, or one for each")
        requests = [self._request(prompt, given) for prompt, given in zip(prompts, each, strict=True)]
        jobs = [_Job(request, self.decode, on_tokens) for request in requests]
        self._post.submit(jobs)
        return jobs

    def _request(self, prompt: Prompt, params: Params) -> Request:
        submit = pb.Submit(key=next(self._keys), request_id=secrets.token_bytes(16))
        submit.prompt_token_ids.extend(self.encode(prompt) if isinstance(prompt, str) else prompt)
        sampling: dict[str, Any] = {}
        for name, value in params.items():
            if name in _CONSTRAINTS or name in ("priority", "cache_salt", "deadline_ms"):
                setattr(submit, name, value)
            else:
                sampling[name] = value
        try:
            ParseDict(sampling, submit.sampling)
            return to_request(submit, _STREAM, self._facts)
        except ParseError as error:
            raise ValueError(f"params: {error}") from None
        except InvalidSubmitError as error:
            raise ValueError(error.error.message) from None


class _Job:
    """One request of a caller and what has come back of it. Filled in by the engine's thread alone."""

    def __init__(self, request: Request, decode: Callable[[list[int]], str], on_tokens: OnTokens | None) -> None:
        self.request = request
        self.done: Future[Completion] = Future()
        self._completion = Completion(list(request.prompt_token_ids))
        self._decode = decode
        self._on_tokens = on_tokens

    def take(self, token_ids: list[int], cached_tokens: int, finish_reason: int) -> None:
        completion = self._completion
        completion.token_ids += token_ids
        completion.num_cached_tokens = max(completion.num_cached_tokens, cached_tokens)
        if self._on_tokens is not None and token_ids:
            self._on_tokens(token_ids)
        if finish_reason:
            completion.finish_reason = FinishReason(finish_reason)
            completion.text = self._decode(completion.token_ids)
            self.settle(completion)

    def describe(self, logprobs: list[TokenLogprob], *, of_prompt: bool) -> None:
        into = self._completion.prompt_logprobs if of_prompt else self._completion.logprobs
        into += logprobs

    def settle(self, outcome: Completion | Exception) -> None:
        if self.done.done():  # cancelled by asyncio
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class _ClosedError(Exception):
    """The engine's thread is to end."""


class _Post:
    """Inbox and outbox of the engine, and the jobs that wait for what it publishes."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._end: Exception | None = None

    # --- callers' side --------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            if self._end is not None:
                raise RuntimeError(f"the engine has ended: {self._end}") from self._end
            self._jobs.update((job.request.id[1], job) for job in jobs)
        self._commands.put(Submit([job.request for job in jobs]))

    def abort(self, jobs: Sequence[_Job]) -> None:
        """Ends what has not ended; nobody waits for it any more."""
        with self._lock:
            live = [job.request.id for job in jobs if self._jobs.pop(job.request.id[1], None) is not None]
        if live:
            self._commands.put(Abort(live))

    def close(self) -> None:
        self._commands.put(None)

    # --- the engine's side ----------------------------------------------------------------------------------------

    def run(self, turn_for_ever: Callable[[], None]) -> None:
        try:
            turn_for_ever()
        except _ClosedError as error:
            self._fail_all(error)
        except Exception as error:
            logger.exception("the engine ends")
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._end = error
            left = list(self._jobs.values())
            self._jobs.clear()
        for job in left:
            job.settle(RuntimeError(f"the engine has ended: {error}"))

    def drain(self, *, wait: bool) -> list[Command]:
        commands: list[Command] = []
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                raise _ClosedError("it was closed")
            commands.append(command)
            wait = False
        return commands

    def publish(self, event: Event) -> None:
        if isinstance(event, StepDone):
            for columns in event.streams:
                self._take(columns)

    def _take(self, columns: StreamColumns) -> None:
        for key, error in columns.errors:
            job = self._forget(key)
            if job is not None:
                job.settle(RequestFailedError(error))
        described = (
            (columns.logprobs, False),
            (columns.prompt_logprobs, True),
        )
        for logprobs, of_prompt in described:
            for row, tokens in _by_row(logprobs):
                job = self._jobs.get(columns.keys[row])
                if job is not None:
                    job.describe(tokens, of_prompt=of_prompt)
        first = 0
        for row, key in enumerate(columns.keys):
            token_ids = columns.token_ids[first : first + columns.token_counts[row]].tolist()
            first += len(token_ids)
            finish_reason = columns.finish_reasons[row]
            job = self._forget(key) if finish_reason else self._jobs.get(key)
            if job is not None:
                job.take(token_ids, columns.cached_tokens[row], finish_reason)

    def _forget(self, key: int) -> _Job | None:
        with self._lock:
            return self._jobs.pop(key, None)


def _by_row(columns: LogprobColumns | None) -> Iterator[tuple[int, list[TokenLogprob]]]:
    if columns is None:
        return
    tokens = zip(columns.token_ids, columns.logprobs, columns.top_counts, strict=True)
    tops = zip(columns.top_token_ids, columns.top_logprobs, strict=True)
    for row, count in zip(columns.rows, columns.counts, strict=True):
        described = itertools.islice(tokens, count)
        yield row, [TokenLogprob(token_id, p, list(itertools.islice(tops, num))) for token_id, p, num in described]


def _flags(options: Mapping[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags


def _tokenizer(model_dir: Path) -> Tokenizer | None:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
