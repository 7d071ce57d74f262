"""Serves prompts on a real model through the real engine, under given circumstances, in pages that are poisoned.

Every page is poisoned before the first request and again whenever it is given back, also when it goes to the host tier,
so whoever reads what nobody wrote for it, or what is nobody's any more, gets NaN. Neighbours run beside the subjects
all the time; displacers, requests of a higher priority, take a subject's place after every step that it took part in.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baleen_worker.cache.host import HostTier
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.engine import Engine
from baleen_worker.messages import Abort, Submit
from baleen_worker.output import RequestError
from baleen_worker.request import Request, SamplingParams
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import BuiltRunner, Runner, StepHandle, StepPlan
from circumstances import PAGE_SIZE, Circumstances
from engine_rig import Lines, by_row

_SUBJECT, _NEIGHBOUR, _DISPLACER, _WARMER = range(1, 5)  # streams, whose priorities differ
_PRIORITY = {_SUBJECT: 0, _NEIGHBOUR: 1, _DISPLACER: 2, _WARMER: 0}
_NEIGHBOUR_TOKENS = 400
_OTHER_SEEDS = 10**6  # from here on: subjects are told apart from all others by their seeds


@dataclass
class Answer:
    """What one request was told. `margins`: how much likelier the likeliest token was than the next, if asked for."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    margins: list[float] = field(default_factory=list[float])
    cached_tokens: int = 0
    ended: bool = False
    error: RequestError | None = None


class Watched:
    """Passes plans on to a runner and counts the rows of one request, told by its seed.

    `num_landmarks` counts those after which the request can lose its place and still come nearer to its end: those that
    sample, and with a cache, which keeps what was computed, all.
    """

    def __init__(self, inner: Runner, *, with_cache: bool) -> None:
        self._inner = inner
        self._with_cache = with_cache
        self._seeds: dict[int, int] = {}
        self.watched_seed = -1
        self.num_landmarks = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner`."""
        self._seeds |= {admission.slot: admission.sampling.seed for admission in plan.admissions}
        for row in plan.rows:
            if self._seeds[row.slot] == self.watched_seed:
                self.num_landmarks += row.sample or self._with_cache
        return self._inner.launch(plan)


class Service:
    """One engine under one set of circumstances."""

    def __init__(self, built: BuiltRunner, how: Circumstances, *, runner: Runner | None = None) -> None:
        """`runner` stands before the built one where a test meddles with it."""
        self.how = how
        self.runner = Watched(runner or built.runner, with_cache=how.prefix != "off")
        self.pages = PagePool(built.num_pages, on_free=built.poison)
        built.poison(range(1, built.num_pages))
        self.host = None if how.write_policy is None else HostTier(built.num_host_pages, how.write_policy)
        self.cache = PrefixCache(self.pages, host=self.host) if how.prefix != "off" else None
        limits = SchedulerLimits(how.neighbours + 1, how.chunk, 1000, preemption_threshold=0)
        self.scheduler = Scheduler(limits, self.pages, self.cache)
        self.lines = Lines()
        self.engine = Engine(self.scheduler, self.runner, self.lines, self.lines, depth=how.depth)
        self.answers: dict[tuple[int, int], Answer] = {}
        self._keys = itertools.count(1)

    def ask(self, prompt: Sequence[int], sampling: SamplingParams, *, told: Sequence[int] = ()) -> Answer:
        """One subject from its first step to its end, and what it was told. `told`: what an earlier attempt was."""
        if self.how.prefix not in ("off", "miss"):
            self._warm(prompt)
        self._keep_neighbours()
        assert sampling.seed < _OTHER_SEEDS
        self.runner.watched_seed = sampling.seed
        subject = self._submit(_SUBJECT, prompt, sampling, told)
        seen, displacer = self.runner.num_landmarks, None
        while not subject.ended:
            if self.how.displaced and self.runner.num_landmarks > seen and (displacer is None or displacer.ended):
                seen = self.runner.num_landmarks
                displacer = self._submit(_DISPLACER, [5, 6, 7], SamplingParams(max_tokens=1, seed=_OTHER_SEEDS))
            self._turn()
        self._finish(displacer)
        self.runner.watched_seed = -1
        return subject

    def close(self) -> None:
        """Ends the neighbours; every page must come back."""
        live = [request_id for request_id, answer in self.answers.items() if not answer.ended]
        self.lines.commands.append(Abort(live))
        while not self.scheduler.idle:
            self._turn()
        self.scheduler.check()
        assert self.scheduler.load.used_pages == 0
        assert all(answer.error is None for answer in self.answers.values())

    def _warm(self, prompt: Sequence[int]) -> None:
        """Has somebody compute the prompt, or the first part of it and then something else, from within a page."""
        known = list(prompt)
        if self.how.prefix == "part":
            shared = max(len(prompt) * 2 // 3, 1)
            known = [*prompt[:shared], *((token_id + 1) % 200 for token_id in prompt[shared:])]
        self._finish(self._submit(_WARMER, known, SamplingParams(max_tokens=1, seed=_OTHER_SEEDS)))

    def _keep_neighbours(self) -> None:
        """As many as there must be, none near its end, all past their prompts."""
        live = [a for (stream, _), a in self.answers.items() if stream == _NEIGHBOUR and not a.ended]
        while len(live) < self.how.neighbours:
            key = next(self._keys)
            draw = random.Random(key)
            prompt = [draw.randrange(3, 200) for _ in range(draw.choice([1, 9, 40, 63, 64, 65, 70]))]
            sampling = SamplingParams(max_tokens=_NEIGHBOUR_TOKENS, seed=_OTHER_SEEDS + key, temperature=key % 2)
            live.append(self._submit(_NEIGHBOUR, prompt, sampling))
        while not all(answer.token_ids for answer in live):
            self._turn()

    def _submit(self, stream: int, prompt: Sequence[int], sampling: SamplingParams, told: Sequence[int] = ()) -> Answer:
        request = Request(
            (stream, next(self._keys)),
            list(prompt),
            sampling,
            priority=_PRIORITY[stream],
            resumed_token_ids=list(told),
        )
        self.lines.commands.append(Submit([request]))
        answer = self.answers[request.id] = Answer()
        return answer

    def _finish(self, answer: Answer | None) -> None:
        while answer is not None and not answer.ended:
            self._turn()

    def _turn(self) -> None:
        if self.host is not None and self.cache is not None:
            self.cache.evict(self.cache.num_idle)
        self.engine.turn()
        for step in self.lines.steps():
            for columns in step.streams:
                logprobs, start = by_row(columns.logprobs), 0
                for row, (key, count) in enumerate(zip(columns.keys, columns.token_counts, strict=True)):
                    answer = self.answers[columns.stream, key]
                    answer.token_ids += columns.token_ids[start : start + count]
                    if row in logprobs:
                        answer.logprobs += logprobs[row].logprobs
                        answer.margins += [top[0] - top[1] for top in logprobs[row].top_logprobs if len(top) > 1]
                    answer.cached_tokens = max(answer.cached_tokens, columns.cached_tokens[row])
                    answer.ended = bool(columns.finish_reasons[row])
                    start += count
                for key, error in columns.errors:
                    answer = self.answers[columns.stream, key]
                    answer.ended, answer.error = True, error


def serve(
    built: BuiltRunner, how: Circumstances, prompts: Iterable[Sequence[int]], sampling: Sequence[SamplingParams]
) -> tuple[list[Answer], Service]:
    """The answers to prompts that come one after another, and the service that gave them, at rest."""
    service = Service(built, how)
    answers = [service.ask(prompt, each) for prompt, each in zip(prompts, sampling, strict=True)]
    service.close()
    return answers, service


def edges(*lengths: int) -> list[int]:
    """Each length, one less and one more."""
    return [length + offset for length in lengths for offset in (-1, 0, 1)]


__all__ = ["PAGE_SIZE", "Answer", "Service", "Watched", "edges", "serve"]
