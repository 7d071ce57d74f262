"""The measurements of a slice of the model, as far as they need no GPU: slices, lines through times, and a peer."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from baleen_bench import peer, slice, slice_command, steady, timeline  # noqa: E402
from baleen_worker.model.fused.model import why_not  # noqa: E402
from baleen_worker.model_config import load_model_config  # noqa: E402

VLLM = """
import os, time
assert os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]
class LLM:
    def __init__(self, *, model, load_format, max_num_batched_tokens, **options):
        assert load_format == "dummy" and max_num_batched_tokens == 8192
        assert os.path.exists(os.path.join(model, "config.json"))
    def generate(self, prompts, params, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) == 64 for prompt in prompts)
        if len(prompts) == 3:
            raise RuntimeError("out of memory")
        time.sleep(0.01 + 0.001 * params.tokens)
"""


@pytest.mark.parametrize("name", slice.SLICES)
def test_every_slice_is_a_model_for_the_fused_ops(name: str, tmp_path: Path) -> None:
    slice.write_config(tmp_path, slice.SLICES[name])
    config = load_model_config(tmp_path)
    assert why_not(config) is None
    assert config.num_hidden_layers == (7 if name == "v32-slice7" else 61)


def test_a_rank_of_expert_parallelism_gets_the_picks_of_all_ranks() -> None:
    rank = slice.RELEASED | slice.SLICES["v32-dp8ep8-rank"]
    of_all_ranks = 512 * slice.RELEASED["num_experts_per_tok"] * rank["n_routed_experts"] / 256
    assert 64 * rank["num_experts_per_tok"] == of_all_ranks


def test_the_cost_of_context_is_that_of_61_layers() -> None:
    line = steady.fit(16, [4096, 8192, 16_384], [8.0 + 0.007 * k for k in (4, 8, 16)], num_layers=7)
    assert line.base_ms == pytest.approx(8.0)
    assert line.slope_ms_per_k == pytest.approx(0.007)
    assert line.us_per_query_per_k == pytest.approx(7 / 16 * 61 / 7)
    assert line.r_squared == pytest.approx(1.0)


def test_steps_at_every_context_pick_the_same_experts_since_their_pages_are_the_same() -> None:
    short, long = (steady._spread(32, context // 64, 5000) for context in (4096, 8192))
    assert [steps for _, steps in short] == [steps for _, steps in long]
    for rows, context in ((short, 4096), (long, 8192)):
        pages = [page for past, steps in rows for page in past + steps]
        assert len(set(pages)) == len(pages) == 32 * steady.pages_of(context)
        assert min(pages) > 0
        assert max(pages) < 5000


def test_idle_time_is_that_behind_the_last_kernel_of_each_step() -> None:
    spans = [timeline.Span(name, start, 2.0, 0) for name, start in (("a", 0), ("_keep", 3), ("a", 12), ("_keep", 14))]
    assert timeline.gaps_after([*spans, timeline.Span("a", 17.0, 1.0, 0)], "_keep") == [7.0, 1.0]


@pytest.fixture
def with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    folders = tmp_path, ROOT / "bench", ROOT / "worker", ROOT / "kernels"
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, folders)))


@pytest.mark.usefixtures("with_vllm")
def test_a_peer_is_measured_in_a_process_of_its_own_and_set_beside_our_rows() -> None:
    rows = peer.measure(((1, 64), (2, 64)), timeout_s=120)
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 64), (2, 64)]
    ours = dataclasses.asdict(slice.Measured(2, 64, 1000.0, 1.0, 4.0, 500.0))
    both = peer.beside(ours, rows)
    assert both["decode_over_peer"] == 4.0 / rows[1]["decode_ms"]
    assert both["prefill_over_peer"] == 1000.0 / rows[1]["prefill_tok_s"]
    assert peer.beside(ours | {"batch": 8}, rows) == ours | {"batch": 8}


@pytest.mark.usefixtures("with_vllm")
def test_a_peer_that_fails_is_an_error_with_a_sentence() -> None:
    with pytest.raises(peer.PeerError, match="its process ended with code 1"):
        peer.measure(((3, 64),), timeout_s=120)


@pytest.mark.usefixtures("with_vllm")
def test_our_rows_are_kept_when_the_peer_fails_and_its_finished_cases_are_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = [dataclasses.asdict(slice.Measured(batch, 64, 1000.0, 1.0, 4.0, 500.0)) for batch in (1, 3)]
    monkeypatch.setattr(slice_command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(slice_command, "_variant", lambda *_: ours)
    monkeypatch.setattr(slice_command, "_header", lambda _: {})
    out = tmp_path / "rows.json"
    options = ["--out", str(out), "--variant", "bf16", "--cases", "1x64,3x64", "--peer", "vllm"]
    assert slice_command.main(options) == 2
    assert "its process ended with code 1" in capfd.readouterr().out
    first, second = json.loads(out.read_text("utf-8"))["measurements"]
    assert first["decode_over_peer"] == 4.0 / first["run_peer_decode_ms"]
    assert second == ours[1]


def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(peer.PeerError, match=r"the package vllm is not installed: pip install vllm==0\.26\.0"):
        peer.measure(((1, 64),), timeout_s=10)


def test_the_config_of_a_slice_can_be_had_alone(tmp_path: Path) -> None:
    assert slice_command.main(["--slice", "v32-tp8-rank", "--config-only", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["num_attention_heads"] == 16
