"""Our own kernels where no GPU is: Triton's through its interpreter, and through its compiler for Hopper.

Both need Triton, which PyTorch's CUDA build brings; each runs in a process of its own, because Triton looks at the
environment when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from baleen_kernels import mla_pages
from baleen_kernels.mla_slots import parts_of
from baleen_kernels.own import build
from baleen_kernels.thin_gemm import cut_of
from baleen_kernels.topk_slots import blocks_per_row

TRITON_OPS = (
    "absorb_queries",
    "combine_norm",
    "compact_slots",
    "decode_inputs",
    "decode_results",
    "fp8_quant",
    "greedy_choice",
    "indexer_prep",
    "mask_logits",
    "merge_parts",
    "mla_pages",
    "mla_prep",
    "mla_slots",
    "moe_boxes",
    "moe_combine",
    "moe_route",
    "moe_scatter",
    "moe_segments",
    "moe_tiles",
    "norm_quant",
    "page_copy",
    "page_digest",
    "rotate_queries",
    "sample",
    "swiglu_quant",
    "thin_gemm",
    "tile_hidden",
    "tile_out",
    "value_quant",
)
QUICK = ("fp8_quant", "greedy_choice", "moe_route", "page_digest")
# The interpreter takes minutes over 2048 slots and 128 heads.
_LONG = (pytest.mark.slow, pytest.mark.timeout(1200))


def _run(script: str, op: str, *settings: str, **environment: str) -> dict[str, str]:
    """What the script says of each case: "ok" or what went wrong."""
    pytest.importorskip("triton")
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, str(path), op, *settings],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", [pytest.param(op, marks=() if op in QUICK else _LONG) for op in TRITON_OPS])
def test_triton_kernels_equal_the_reference_in_the_interpreter(op: str) -> None:
    outcomes = _run("run_triton.py", op, TRITON_INTERPRET="1")
    assert set(outcomes.values()) == {"ok"}, outcomes


def test_the_kernel_for_many_queries_equals_the_reference() -> None:
    outcomes = _run("run_triton.py", "indexer_prep", "indexer_prep._MANY=0", TRITON_INTERPRET="1")
    assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.slow
def test_the_kernel_for_many_queries_compiles_for_hopper(tmp_path: Path) -> None:
    outcomes = _run("compile_triton.py", "indexer_prep", "indexer_prep._MANY=0", TRITON_CACHE_DIR=str(tmp_path))
    assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("op", TRITON_OPS)
def test_triton_kernels_compile_for_hopper(op: str, tmp_path: Path) -> None:
    outcomes = _run("compile_triton.py", op, TRITON_CACHE_DIR=str(tmp_path))
    assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [80, 89, 100])
def test_sparse_attention_compiles_for_other_gpus(arch: int, tmp_path: Path) -> None:
    outcomes = _run("compile_triton.py", "mla_slots", f"arch={arch}", TRITON_CACHE_DIR=str(tmp_path))
    assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.parametrize(
    ("num_rows", "width", "blocks"),
    [
        (1, 131_072, 16),
        (1, 2_048, 1),
        (4, 131_072, 16),
        (16, 32_768, 8),
        (64, 8_192, 2),
        (64, 65_536, 2),
        (4096, 32_768, 1),
    ],
)
def test_few_long_rows_share_blocks(num_rows: int, width: int, blocks: int) -> None:
    assert blocks_per_row(num_rows, width) == blocks


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "topk", "parts"),
    [
        (1, 128, 2048, 8),
        (8, 128, 2048, 8),
        (16, 128, 2048, 4),
        (16, 64, 2048, 8),
        (32, 128, 2048, 2),
        (34, 128, 2048, 1),
        (1, 128, 256, 2),
        (1, 128, 128, 1),
    ],
)
def test_few_tokens_cut_their_selection(num_tokens: int, num_heads: int, topk: int, parts: int) -> None:
    assert parts_of(num_tokens, num_heads, topk) == parts


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_pages", "parts"),
    [
        (1, 128, 2048, 16),
        (1, 128, 64, 16),
        (1, 128, 63, 8),
        (1, 16, 7, 1),
        (16, 128, 64, 8),
        (64, 128, 64, 2),
        (67, 128, 64, 1),
    ],
)
def test_few_rows_cut_their_pages(num_rows: int, num_heads: int, num_pages: int, parts: int) -> None:
    assert mla_pages.parts_of(num_rows, num_heads, num_pages) == parts


@pytest.mark.parametrize(
    ("out_features", "width", "tile", "parts"),
    [
        (2240, 7168, 64, 8),
        (32_768, 1536, 128, 1),
        (7168, 16_384, 128, 2),
        (4096, 7168, 64, 4),
        (7168, 2048, 128, 2),
        (36_864, 7168, 128, 1),
        (64, 512, 64, 1),
        (64, 1024, 64, 2),
    ],
)
def test_thin_products_are_cut_to_fill_a_device(out_features: int, width: int, tile: int, parts: int) -> None:
    assert cut_of(out_features, width) == (tile, parts)


@pytest.mark.parametrize(
    ("arch", "num_heads", "wide", "tile"),
    [
        (90, 128, False, (64, 64, 2, 8)),
        (80, 128, False, (64, 32, 3, 8)),
        (100, 64, False, (64, 32, 3, 8)),
        (89, 128, False, (32, 16, 2, 4)),
        (90, 17, False, (32, 64, 2, 4)),
        (90, 1, False, (16, 64, 2, 4)),
        (90, 128, True, (16, 16, 1, 4)),
        ("gfx942", 128, False, (16, 16, 1, 4)),
    ],
)
def test_tiles_fit_shared_memory(arch: int | str, num_heads: int, wide: bool, tile: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from baleen_kernels.own.mla_slots import tile_of

    chosen = tile_of(arch, num_heads, wide=wide)
    assert (chosen.heads, chosen.keys, chosen.stages, chosen.warps) == tile


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tilelang_kernel_equals_the_reference_on_the_host() -> None:
    """The CUDA that TileLang makes of it, its threads in random order and its asynchronous work early and late."""
    compiler = shutil.which("c++")
    # Only looked for: importing it changes the environment of whoever does.
    if importlib.util.find_spec("tilelang") is None or compiler is None:
        pytest.skip("TileLang or a C++ compiler is missing: pip install tilelang==0.1.15")
    outcomes = _run("run_tilelang.py", compiler)
    assert set(outcomes.values()) == {"ok"}, outcomes


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("BALEEN_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"topk_slots\.cu has to be compiled, but nvcc was not found: set CUDA_HOME"):
        build.load("topk_slots")


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'nvcc fatal: no such target'\nexit 1\n", "utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("BALEEN_KERNEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="nvcc fatal: no such target"):
        build.load("topk_slots")
    assert list((tmp_path / "cache").iterdir()) == []
