"""Pages that are given back hold NaN, and whoever reads one all the same is found out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baleen_worker.cache.storage import PagedPools, choose_layout
from baleen_worker.command_line import parse
from baleen_worker.config import WorkerConfig
from baleen_worker.request import SamplingParams
from baleen_worker.runner import build_runner
from baleen_worker.step import BuiltRunner, Runner, StepHandle, StepPlan
from circumstances import Circumstances
from model_rig import Service, serve
from product import model_config
from tiny_checkpoint import write_checkpoint
from tiny_models import V32, make_weights

TOPK = 32
CONFIG = {**V32, "index_topk": TOPK, "kv_lora_rank": 128, "index_head_dim": 128}
HELD = (1, 2)
GREEDY = SamplingParams(max_tokens=6, seed=1, temperature=0.0, logprobs=0)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    folder = write_checkpoint(tmp_path_factory.mktemp("poison"), CONFIG, make_weights(CONFIG, seed=3))
    return build_runner(WorkerConfig(model_dir=folder, device="cpu", dtype="float32", max_total_tokens=64 * 40))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 250), k=length)


def pools(dtype: torch.dtype, kv_cache_dtype: str) -> PagedPools:
    layout = choose_layout(model_config(CONFIG), dtype=dtype, kv_cache_dtype=kv_cache_dtype, index_hadamard=True)
    return PagedPools(layout, 5, device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "fp8_e4m3")],
    ids=["float32", "bfloat16", "fp8"],
)
def test_every_value_of_a_poisoned_page_is_nan_and_of_no_other(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    store = pools(dtype, kv_cache_dtype)
    slots = torch.arange(5 * 64)
    for layer in range(CONFIG["num_hidden_layers"]):
        store.write_latent(layer, slots, torch.ones(320, 128, dtype=dtype), torch.ones(320, 16, dtype=dtype))
        store.write_index_k(layer, slots, torch.ones(320, 128, dtype=dtype))
    store.poison([1, 3])
    poisoned = torch.tensor([False, True, False, True, False]).repeat_interleave(64)
    for layer in range(CONFIG["num_hidden_layers"]):
        for values in (*store.read_latent(layer, slots), store.read_index_k(layer, slots)):
            assert (values.isnan() == poisoned[:, None]).all()


class FreesTooEarly:
    """A product with a fault: pages that a request reads are given back when its third step is launched.

    `parts`: which of the two stores are poisoned then, because a fault may spare one of them.
    """

    def __init__(self, inner: Runner, pools: PagedPools, pages: Sequence[int], parts: tuple[int, ...]) -> None:
        self._inner, self._pools, self._pages, self._parts = inner, pools, pages, parts
        self._num_steps = 0

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner`."""
        self._num_steps += 1
        if self._num_steps == 3:
            for layer in range(CONFIG["num_hidden_layers"]):
                for page in self._pages:
                    stores = self._pools.page_bytes(layer, page)
                    for part in self._parts:
                        stored = stores[part]
                        assert stored is not None
                        stored.fill_(0xFF)
        return self._inner.launch(plan)


def pools_of(built: BuiltRunner) -> PagedPools:
    found = getattr(built.poison, "__self__", None)
    assert isinstance(found, PagedPools)
    return found


@pytest.mark.parametrize("parts", [(0, 1), (0,), (1,)], ids=["both", "latents", "index keys"])
def test_a_page_that_is_freed_while_it_is_read_is_noticed(built: BuiltRunner, parts: tuple[int, ...]) -> None:
    how = Circumstances()
    [sound], _ = serve(built, how, [prompt(100)], [GREEDY])
    assert sound.error is None
    faulty = FreesTooEarly(built.runner, pools_of(built), HELD, parts)
    told = Service(built, how, runner=faulty).ask(prompt(100), GREEDY)
    assert told.error is not None or told.token_ids != sound.token_ids or told.logprobs != sound.logprobs
    if 0 in parts:
        assert told.error is not None
        assert "not finite" in told.error.message


def test_a_freed_page_is_poisoned_before_anybody_can_be_granted_it(built: BuiltRunner) -> None:
    store = pools_of(built)
    _, service = serve(built, replace(Circumstances(), prefix="miss"), [prompt(100)], [GREEDY])
    assert service.scheduler.flush()
    for page in range(1, built.num_pages):
        for layer in range(CONFIG["num_hidden_layers"]):
            for part in store.page_bytes(layer, page):
                assert part is not None
                assert (part == 0xFF).all()


def test_the_flag_is_off_unless_it_is_given() -> None:
    micro = str(Path(__file__).resolve().parents[3] / "models" / "micro")
    assert not parse([micro]).worker.poison_freed_pages
    assert parse([micro, "--poison-freed-pages"]).worker.poison_freed_pages
