"""Stored tensors reach the model exactly, in the right type; what does not fit is reported together and unread."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_kernels.fp8_quant import dequantize_weight
from baleen_worker import weights
from baleen_worker.json_keys import CheckpointError
from baleen_worker.model.numerics import Numerics
from baleen_worker.model_config import load_model_config
from baleen_worker.runner import empty_model
from safetensors.torch import load_file, save_file
from tiny_checkpoint import Tiny, load, read_config, write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from baleen_worker.model.deepseek_v32 import DeepseekForCausalLM

MICRO = Path(__file__).parents[3] / "models" / "micro"
GOLDEN_FP8 = Path(__file__).parents[1] / "golden" / "v32_fp8"


def dequantised(values: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """Each value times the scale that is looked up for its row and its column."""
    rows, columns = (torch.arange(size) // t for size, t in zip(values.shape, tile, strict=True))
    return values.float() * scales[rows[:, None], columns[None, :]]


def quantised(tensors: dict[str, Tensor], tile: tuple[int, int]) -> dict[str, Tensor]:
    """The tiny model's projections in e4m3, with uneven scales and partial tiles."""
    g = torch.Generator().manual_seed(1)
    out = dict(tensors)
    for name, tensor in tensors.items():
        if re.search(r"(proj|wk|wq_b|mqa)\.weight$", name) and "weights_proj" not in name:
            grid = [-(-size // t) for size, t in zip(tensor.shape, tile, strict=True)]
            out[name] = (40 * torch.randn(tensor.shape, generator=g)).to(torch.float8_e4m3fn)
            out[name + "_scale_inv"] = 0.01 * torch.rand(grid, generator=g) + 0.001
    return out


def quantised_config(folder: Path, tile: tuple[int, int]) -> dict[str, Any]:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(tile)}
    return read_config(folder) | {"quantization_config": quantization}


def test_plain_tensors_arrive_unchanged(tiny_v32: Tiny) -> None:
    model, report, _ = load(tiny_v32.folder)
    stored = tiny_v32.tensors()
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    assert report.num_tensors == len(stored)
    assert report.num_bytes_read == report.weights_bytes == 4 * sum(t.numel() for t in stored.values())
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_stored_types_widen_exactly(tiny_v3: Tiny, tmp_path: Path, stored_dtype: torch.dtype) -> None:
    stored = {name: tensor.to(stored_dtype) for name, tensor in tiny_v3.tensors().items()}
    model, _, _ = load(write_checkpoint(tmp_path, read_config(tiny_v3.folder), stored))
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in model.state_dict().items())


def test_bfloat16_keeps_in_float32_what_must_be(tiny_v32: Tiny) -> None:
    model, _, _ = load(tiny_v32.folder, dtype=torch.bfloat16)
    stored = tiny_v32.tensors()
    wide = re.compile(r"norm\.(weight|bias)$|mlp\.gate\.|weights_proj|lm_head")
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if wide.search(name) else torch.bfloat16), name
        assert torch.equal(tensor, stored[name].to(tensor.dtype))


# Tiles that leave partial rows, partial columns, both, and one tile for everything.
@pytest.mark.parametrize("tile", [(128, 128), (32, 32), (50, 28), (7, 100)])
def test_block_fp8_is_dequantised_by_tile(tiny_v32: Tiny, tmp_path: Path, tile: tuple[int, int]) -> None:
    stored = quantised(tiny_v32.tensors(), tile)
    model, _, _ = load(write_checkpoint(tmp_path, quantised_config(tiny_v32.folder, tile), stored))
    checked = 0
    for name, tensor in model.state_dict().items():
        if (scales := stored.get(name + "_scale_inv")) is None:
            assert torch.equal(tensor, stored[name])
        elif "experts" not in name and ".2." not in name:
            assert torch.equal(tensor, dequantised(stored[name], scales, tile)), name
            checked += 1
    assert checked > 10


def test_slabs_do_not_show(tiny_v32: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = (16, 24)
    folder = write_checkpoint(tmp_path, quantised_config(tiny_v32.folder, tile), quantised(tiny_v32.tensors(), tile))
    whole = load(folder)[0].state_dict()
    monkeypatch.setattr(weights, "_SLAB_BYTES", 1)
    sliced = load(folder)[0].state_dict()
    assert all(torch.equal(tensor, sliced[name]) for name, tensor in whole.items())


def test_opening_files_anew_does_not_show(tiny_v32: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MAX_MAPPED_BYTES", 5000)
    model, _, _ = load(tiny_v32.folder)
    stored = tiny_v32.tensors()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_golden_fp8_equals_the_op_and_can_be_kept() -> None:
    stored = load_file(GOLDEN_FP8 / "model.safetensors")
    model, _, _ = load(GOLDEN_FP8)
    for name, tensor in model.state_dict().items():
        expected = stored[name].float()
        if name + "_scale_inv" in stored:
            expected = dequantize_weight(stored[name], stored[name + "_scale_inv"], dtype=torch.float32)
        assert torch.equal(tensor, expected), name
    kept, _, _ = load(GOLDEN_FP8, keep_fp8=True)
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor.float(), stored[name].float()), name
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in kept.state_dict().values())


def test_scales_may_be_in_another_file_and_type(tiny_v32: Tiny, tmp_path: Path) -> None:
    tile = (32, 32)
    stored = quantised(tiny_v32.tensors(), tile)
    stored = {n: t.to(torch.float8_e8m0fnu) if n.endswith("_inv") else t for n, t in stored.items()}
    files = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in stored.items():
        files["b.safetensors" if name.endswith("_inv") else "a.safetensors"][name] = tensor
    write_checkpoint(tmp_path, quantised_config(tiny_v32.folder, tile), stored)
    whole = load(tmp_path)[0].state_dict()
    (tmp_path / "model.safetensors").unlink()
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    split = load(tmp_path)[0].state_dict()
    assert all(torch.equal(tensor, split[name]) for name, tensor in whole.items())


def test_known_extras_are_left_out(tiny_v32: Tiny, tmp_path: Path) -> None:
    stored = tiny_v32.tensors()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    stored["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    stored["model.layers.4.enorm.weight"] = torch.ones(2)
    config = read_config(tiny_v32.folder) | {"num_nextn_predict_layers": 2}
    _, report, _ = load(write_checkpoint(tmp_path, config, stored))
    assert report.num_mtp_tensors_skipped == 2
    config["num_nextn_predict_layers"] = 1
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model.layers.4.enorm.weight\)"):
        load(write_checkpoint(tmp_path, config, stored))


def test_the_micro_checkpoint_loads_from_its_shards() -> None:
    _, report, config = load(MICRO)
    index = json.loads((MICRO / "model.safetensors.index.json").read_text("utf-8"))
    mtp = [name for name in index["weight_map"] if name.startswith(f"model.layers.{config.num_hidden_layers}.")]
    assert report.num_mtp_tensors_skipped == len(mtp) > 0


def test_tied_embeddings(tiny_v32: Tiny, tmp_path: Path) -> None:
    stored = tiny_v32.tensors()
    config = read_config(tiny_v32.folder) | {"tie_word_embeddings": True}
    copied, _, _ = load(write_checkpoint(tmp_path, config, stored))
    del stored["lm_head.weight"]
    model, _, _ = load(write_checkpoint(tmp_path, config, stored))
    assert "lm_head.weight" not in model.state_dict().keys() | copied.state_dict().keys()
    x = torch.randn(2, 64)
    assert torch.equal(model.compute_logits(x), x @ stored["model.embed_tokens.weight"].T)


def test_misfits_are_reported_together_and_nothing_is_read(
    tiny_v32: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = quantised(tiny_v32.tensors(), (32, 32))
    o_proj, q_a = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.q_a_proj.weight"
    del stored["model.norm.weight"], stored[q_a + "_scale_inv"]
    stored["model.layers.0.self_attn.bias"] = torch.ones(1)
    stored["lm_head.weight"] = torch.ones(3, 4)
    stored["model.embed_tokens.weight"] = torch.ones(300, 64, dtype=torch.int32)
    stored[o_proj + "_scale_inv"] = torch.ones(9, 9)
    folder = write_checkpoint(tmp_path, quantised_config(tiny_v32.folder, (32, 32)), stored)
    monkeypatch.setattr(weights, "_read", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    sentence = str(caught.value)
    assert f"2 missing ({q_a}_scale_inv, model.norm.weight)" in sentence
    assert "1 unexpected (model.layers.0.self_attn.bias)" in sentence
    assert "lm_head.weight: stored [3, 4], described [300, 64]" in sentence
    assert "model.embed_tokens.weight: stored as I32" in sentence
    assert f"{o_proj}_scale_inv: stored [9, 9], described [2, 3]" in sentence
    assert "\n" not in sentence


def test_fp8_without_its_config(tiny_v32: Tiny, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, read_config(tiny_v32.folder), quantised(tiny_v32.tensors(), (32, 32)))
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3, but config\.json has no quant"):
        load(folder)


def test_scales_of_a_plain_matrix_are_not_ignored(tiny_v32: Tiny, tmp_path: Path) -> None:
    stored = tiny_v32.tensors()
    stored["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match="1 unexpected"):
        load(write_checkpoint(tmp_path, read_config(tiny_v32.folder), stored))


def test_long_lists_are_counted(tiny_v32: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"106 missing \(.* and 98 more\)"):
        load(write_checkpoint(tmp_path, read_config(tiny_v32.folder), {"x": torch.ones(1)}))


def test_progress_ends_at_the_total(tiny_v32: Tiny) -> None:
    calls: list[tuple[int, int]] = []
    _, report, _ = load(tiny_v32.folder, on_progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (report.num_bytes_read, report.num_bytes_read)


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_dummy_weights_are_finite_and_depend_on_names_alone(keep_fp8: bool) -> None:
    config = load_model_config(GOLDEN_FP8)

    def filled(seed: int) -> DeepseekForCausalLM:
        model = empty_model(config, Numerics.for_dtype(torch.float32), keep_fp8=keep_fp8)
        weights.fill_with_dummy_weights(model, device=torch.device("cpu"), seed=seed)
        return model

    first, again, other = filled(1), filled(1), filled(2)
    for name, tensor in first.state_dict().items():
        assert tensor.float().isfinite().all(), name
        assert torch.equal(tensor.float(), again.state_dict()[name].float())
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    wide = first.model.layers[0].self_attn.o_proj.plain_weight()  # type: ignore[union-attr]
    assert 0.5 < wide.std() * wide.shape[1] ** 0.5 < 2


class _Allocations(TorchDispatchMode):
    """Bytes of every storage that operations make while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._kept: list[Tensor] = []  # so that no storage takes the place of another

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor) and x.device.type == "cpu"}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu" and out.untyped_storage().data_ptr() not in given:
            self.sizes.append(out.untyped_storage().nbytes())
            self._kept.append(out)
        return out


def test_dummy_weights_take_memory_for_themselves_and_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_DUMMY_NUMBERS", 1000)  # fewer than most matrices have
    model = empty_model(load_model_config(GOLDEN_FP8), Numerics.for_dtype(torch.float32), keep_fp8=True)
    with _Allocations() as seen:
        weights.fill_with_dummy_weights(model, device=torch.device("cpu"), seed=1)
    held = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    assert sorted(seen.sizes) == sorted([4000, *held])
    last_rows = model.model.embed_tokens.weight[-4:]
    assert 0.8 < last_rows.std() < 1.2
