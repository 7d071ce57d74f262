"""Pages that go to host memory and come back: byte for byte, and with the tokens of a run that never evicted any."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baleen_worker import runner
from baleen_worker.cache.host import HostTier, WritePolicy
from baleen_worker.cache.host_pool import HostPool, host_pages
from baleen_worker.cache.pages import PagePool
from baleen_worker.cache.prefix import PrefixCache
from baleen_worker.cache.storage import KvLayout, PagedPools, choose_layout
from baleen_worker.config import HostCacheConfig, WorkerConfig
from baleen_worker.engine import Engine
from baleen_worker.messages import Command, Event, StepDone, Submit
from baleen_worker.model_config import load_model_config
from baleen_worker.request import Request, SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.scheduler import Scheduler, SchedulerLimits
from baleen_worker.step import CopyError, PageCopies
from late_copies import LateHostPool

MICRO = Path(__file__).parents[3] / "models" / "micro"
MODEL = load_model_config(MICRO)
FLOAT32 = choose_layout(MODEL, dtype=torch.float32, kv_cache_dtype="auto", index_hadamard=False)
PACKED = choose_layout(MODEL, dtype=torch.bfloat16, kv_cache_dtype="fp8_e4m3", index_hadamard=True)
SHARING = replace(FLOAT32, index_layers=(True, *[False] * (FLOAT32.num_layers - 1)))
CPU = torch.device("cpu")
NUM_TOKENS = 6


# --- bytes ------------------------------------------------------------------------------------------------------------


def snapshot(pools: PagedPools) -> list[torch.Tensor]:
    """Every store of every layer, read as a step reads it: after the layer's copies."""
    stores: list[torch.Tensor] = []
    for layer in range(pools.layout.num_layers):
        if pools.before_access is not None:
            pools.before_access(layer)
        stores += [store.clone() for store in pools.page_stores(layer)]
    return stores


@pytest.mark.parametrize("by_layer", [False, True], ids=["at once", "by layer"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", [FLOAT32, PACKED, SHARING], ids=["float32", "fp8", "index cache"])
def test_pages_move_byte_for_byte_and_nothing_else_does(layout: KvLayout, device: str, by_layer: bool) -> None:
    pools = PagedPools(layout, 9, device=torch.device(device), dtype=torch.float32)
    for layer in range(layout.num_layers):
        for store in pools.page_stores(layer):
            store.copy_(torch.randint(0, 256, store.shape, dtype=torch.uint8))
    before = snapshot(pools)
    pool = HostPool(pools, 6, by_layer=by_layer)
    # Runs of consecutive pages and pages alone; page 3 is evicted and granted again within one plan.
    pool.copy(PageCopies([(1, 0), (2, 1), (3, 2), (7, 5)], []))
    pool.copy(PageCopies([(4, 3)], [(5, 3), (0, 8), (1, 4)]))
    came_from = {3: 7, 8: 1, 4: 2}
    for was, store in zip(before, snapshot(pools), strict=True):
        for page in range(9):
            assert torch.equal(store[page], was[came_from.get(page, page)])
    pool.copy(PageCopies([], [(3, 6)]))
    for was, store in zip(before, snapshot(pools), strict=True):
        assert torch.equal(store[6], was[4]), "a page was overwritten before it had been copied out"


def test_a_copy_that_cannot_be_made_is_told_apart_from_a_step_that_fails() -> None:
    pool = HostPool(PagedPools(FLOAT32, 3, device=CPU, dtype=torch.float32), 2)
    with pytest.raises(CopyError):
        pool.copy(PageCopies([(1, 7)], []))


def test_the_size_is_a_ratio_or_gigabytes() -> None:
    assert host_pages(FLOAT32, 100, ratio=2.5, size_gb=None) == 250
    assert host_pages(FLOAT32, 100, ratio=2.0, size_gb=1.0) == 10**9 // FLOAT32.bytes_per_page
    with pytest.raises(ValueError, match="raise --hicache-size"):
        host_pages(FLOAT32, 100, ratio=0.001, size_gb=None)


# --- tokens -----------------------------------------------------------------------------------------------------------


class Server:
    """The micro model in few pages, in process. Freed pages are filled with NaN before anything else is computed."""

    def __init__(self, num_pages: int, policy: WritePolicy | None) -> None:
        tier = None if policy is None else HostCacheConfig(policy.value, ratio=4.0)
        built = build_runner(
            WorkerConfig(MICRO, device="cpu", max_total_tokens=num_pages * 64, max_running_requests=2, host_cache=tier)
        )
        host = None if policy is None else HostTier(built.num_host_pages, policy)
        pages = PagePool(built.num_pages, on_free=built.poison)
        self.scheduler = Scheduler(SchedulerLimits(2, 512, 9), pages, PrefixCache(pages, host=host))
        self._commands: list[Command] = []
        self._tokens: list[int] = []
        self._engine = Engine(self.scheduler, built.runner, self, self)
        self._num_requests = 0

    def drain(self, *, wait: bool) -> list[Command]:
        """For the engine."""
        commands, self._commands = self._commands, []
        return commands

    def publish(self, event: Event) -> None:
        """For the engine."""
        assert isinstance(event, StepDone)
        for columns in event.streams:
            assert not columns.errors
            self._tokens += columns.token_ids

    def answer(self, prompt: list[int]) -> list[int]:
        """The greedy answer to a prompt."""
        self._num_requests += 1
        self._tokens = []
        sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0)
        self._commands.append(Submit([Request((1, self._num_requests), prompt, sampling)]))
        while self._engine.turn() or not self.scheduler.idle:
            pass
        return self._tokens


@pytest.mark.parametrize("pool", [HostPool, LateHostPool])
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_prompt_that_was_evicted_and_poisoned_is_answered_alike(
    monkeypatch: pytest.MonkeyPatch, policy: WritePolicy, pool: type[HostPool]
) -> None:
    monkeypatch.setattr(runner, "HostPool", pool)
    draw = random.Random(3)
    shared = [draw.randrange(16, 1500) for _ in range(150)]
    prompts = [shared + [draw.randrange(16, 1500) for _ in range(200 + 3 * index)] for index in range(3)]
    expected = [Server(40, None).answer(prompt) for prompt in prompts]
    server = Server(8, policy)
    rounds = [[server.answer(prompt) for prompt in prompts] for _ in range(3)]
    assert rounds == [expected] * 3
    load = server.scheduler.load
    assert load.host_fetched_pages >= 6
    assert load.prompt_tokens < 2 * sum(map(len, prompts)), "prompts were computed again"
