"""What is chosen on which machine, said how, and what is refused: machines are made up, nothing runs but the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baleen_kernels import __main__, machine, proof, rms_norm, selection
from baleen_kernels.autoconfig import attention_defaults
from baleen_kernels.machine import Machine

VERSIONS = {"triton": "3.6.0", "flash_mla": "1.0.0", "deep_gemm": "0.1.4.post1", "fa3": "0.0.3"}
H200 = Machine("sm90", "NVIDIA H200", 150 << 30, VERSIONS, {"nvcc": "/usr/local/cuda/bin/nvcc"})
CPU = Machine("cpu", "a CPU")


@pytest.mark.parametrize(
    ("arch", "kv_cache_dtype", "expected"),
    [
        ("sm90", "auto", ("bfloat16", "flashmla_sparse", "fa3")),
        ("sm90", "fp8_e4m3", ("fp8_e4m3", "flashmla_kv", "flashmla_kv")),
        ("sm100", "auto", ("fp8_e4m3", "trtllm", "trtllm")),
        ("sm103", "bfloat16", ("bfloat16", "flashmla_sparse", "trtllm")),
        ("gfx942", "auto", ("bfloat16", "triton", "triton")),
        ("npu", "auto", ("bfloat16", "npu", "npu")),
        ("cpu", "auto", ("bfloat16", "torch", "torch")),
    ],
)
def test_attention_defaults(arch: str, kv_cache_dtype: str, expected: tuple[str, str, str]) -> None:
    chosen = attention_defaults(arch, kv_cache_dtype=kv_cache_dtype)
    assert (chosen.kv_cache_dtype, chosen.prefill, chosen.decode) == expected


def test_unknown_pool_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype 'int8'"):
        attention_defaults("sm90", kv_cache_dtype="int8")


def test_a_hopper_gpu_with_everything_uses_it() -> None:
    chosen = selection.select(H200, kv_cache_dtype="fp8_e4m3")
    assert chosen.backend(selection.PREFILL) == chosen.backend(selection.DECODE) == "flashmla_kv"
    expected = {"masked_gemm": "deep_gemm", "topk_slots": "cuda", "norm_quant": "triton", "mha_dense": "fa3"}
    assert {role: chosen.backend(role) for role in expected} == expected
    assert "kernel:topk_slots=cuda" in chosen.features()
    assert not any(choice.passed_over for choice in chosen.choices)


def test_what_stands_in_for_a_default_says_why() -> None:
    chosen = selection.select(replace(H200, versions={"triton": "3.6.0"}))
    decode = next(choice for choice in chosen.choices if choice.role == selection.DECODE)
    assert decode.backend == "triton"
    reasons = dict(decode.passed_over)
    assert list(reasons) == ["flashmla_sparse", "fa3"]
    assert "pip install --no-deps sgl-flash-mla" in reasons["flashmla_sparse"]
    assert "pip install vllm" in reasons["fa3"]


@pytest.mark.parametrize(
    ("versions", "prefill", "decode"),
    [
        ({**VERSIONS, "vllm_flash_attn": "0.26.0", "tilelang": "0.1.15"}, "flashmla_sparse", "flashmla_sparse"),
        ({"triton": "3.6.0", "tilelang": "0.1.15"}, "tilelang", "triton"),
        ({"triton": "3.6.0", "vllm_flash_attn": "0.26.0"}, "triton", "fa3"),
    ],
)
def test_sparse_attention_is_the_fastest_that_is_there(versions: dict[str, str], prefill: str, decode: str) -> None:
    chosen = selection.select(replace(H200, versions=versions))
    assert (chosen.backend(selection.PREFILL), chosen.backend(selection.DECODE)) == (prefill, decode)


def test_missing_packages_come_with_their_pip_line() -> None:
    bare = replace(H200, versions={}, tools={})
    chosen = selection.select(bare)
    assert {choice.backend for choice in chosen.choices} == {"torch", "cublas"}  # PyTorch brings the latter
    reasons = {choice.role: dict(choice.passed_over) for choice in chosen.choices}
    assert "pip install --no-deps sgl-deep-gemm==0.1.4.post1" in reasons["masked_gemm"]["deep_gemm"]
    assert (
        reasons["topk_slots"]["cuda"]
        == "nvcc was not found: install the CUDA toolkit 12.8 or later, or set CUDA_HOME to it"
    )


def test_a_version_known_to_be_broken_is_not_used() -> None:
    chosen = selection.select(replace(H200, versions={**VERSIONS, "deep_gemm": "0.2.0"}))
    gemm = next(choice for choice in chosen.choices if choice.role == "fp8_gemm")
    assert gemm.backend == "torch"
    assert "another version of PyTorch" in dict(gemm.passed_over)["deep_gemm"]


@pytest.mark.parametrize(
    ("role", "backend", "message"),
    [
        (selection.DECODE, "trtllm", "a Blackwell GPU, and this is NVIDIA H200"),
        (selection.DECODE, "aiter", "an AMD Instinct GPU"),
        (selection.DECODE, "npu", "an Ascend NPU"),
        (selection.DECODE, "fa3", "vllm is not installed"),
        (selection.DECODE, "tilelang", "tilelang is not installed"),
        (selection.DECODE, "nonsense", "no backend 'nonsense'"),
        ("nonsense", "torch", "no op 'nonsense'"),
    ],
)
def test_what_was_asked_for_and_cannot_run_is_an_error(role: str, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection.select(H200, wanted={role: backend})


def test_rows_without_a_call_are_refused_where_everything_else_is_there() -> None:
    blackwell = Machine("sm100", "NVIDIA B200", 180 << 30, {**VERSIONS, "flashinfer": "0.7.2"})
    with pytest.raises(ValueError, match="'trtllm' cannot be used: its call has not been written"):
        selection.select(blackwell, wanted={selection.DECODE: "trtllm"})


def test_shapes_that_a_backend_does_not_take_count_like_a_missing_library() -> None:
    queries, pool = torch.empty(4, 192, 576, device="meta"), torch.empty(128, 576, device="meta")
    slots = torch.empty(4, 2048, dtype=torch.int32, device="meta")
    sample = {"q": queries.bfloat16(), "latents": pool.bfloat16(), "slots": slots, "softmax_scale": 1.0}
    chosen = selection.select(H200, samples={selection.PREFILL: sample})
    assert chosen.backend(selection.PREFILL) == "triton"
    prefill = next(choice for choice in chosen.choices if choice.role == selection.PREFILL)
    assert "up to 128 heads" in dict(prefill.passed_over)["flashmla_sparse"]
    assert chosen.backend(selection.DECODE) == "flashmla_sparse"
    with pytest.raises(ValueError, match="'flashmla_sparse' cannot be used: it takes up to 128 heads"):
        selection.select(H200, wanted={selection.PREFILL: "flashmla_sparse"}, samples={selection.PREFILL: sample})


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_our_own_attention_stands_in_for_the_library(kv_cache_dtype: str) -> None:
    chosen = selection.select(replace(H200, versions={"triton": "3.6.0"}), kv_cache_dtype=kv_cache_dtype)
    assert chosen.backend(selection.PREFILL) == chosen.backend(selection.DECODE) == "triton"


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("bfloat16", torch.bfloat16), ("fp8_e4m3", torch.uint8)])
def test_attention_is_proven_on_a_pool_of_the_chosen_format(
    kv_cache_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[torch.dtype] = []
    monkeypatch.setattr(
        proof, "check_case", lambda op, backend, inputs, *, device: pools.append(inputs["latents"].dtype)
    )
    chosen = selection.select(replace(H200, versions={"triton": "3.6.0"}), kv_cache_dtype=kv_cache_dtype)
    selection.prove(chosen, device="cuda", roles=(selection.PREFILL, selection.DECODE))
    assert pools == [dtype, dtype]


def test_what_was_asked_for_is_used() -> None:
    chosen = selection.select(H200, wanted={"topk_slots": "torch"})
    assert next(choice for choice in chosen.choices if choice.role == "topk_slots").asked_for
    assert chosen.backend("topk_slots") == "torch"


def test_a_cpu_uses_pytorch() -> None:
    chosen = selection.select(CPU)
    assert {choice.backend for choice in chosen.choices} == {"torch"}
    assert len(chosen.choices) == len(selection.OPS) + 1


def test_importing_all_ops_loads_no_kernel_library() -> None:
    code = (
        "import sys; from baleen_kernels import selection, machine; selection.select(machine.describe('cpu'));"
        "print([name for name in ('flash_mla', 'deep_gemm', 'fa3_fwd', 'tilelang', 'baleen_kernels.own')"
        " if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_doctor_checks_and_says_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large cases take seconds on a CPU; here it is the report that counts.
    monkeypatch.setattr(proof, "prove", lambda op, backend, device, **_: f"{op.name}/{backend}/{device}")
    assert __main__.main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "topk_slots             torch            right on case topk_slots/torch/cpu" in printed
    assert "masked_gemm: deep_gemm: it needs a Hopper GPU, and this is a CPU (cpu)" in printed
    assert "trtllm" not in printed


def test_the_doctor_fails_where_a_kernel_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = proof.prove

    def prove(op: object, backend: str, *, device: str, **_: object) -> str:
        return right(rms_norm.OP, backend, device=device) if op is rms_norm.OP else "skipped"

    broken = replace(rms_norm.OP.entry("torch"), call=lambda x, weight, *, eps: x)
    monkeypatch.setattr(proof, "prove", prove)
    monkeypatch.setitem(rms_norm.OP.backends, "torch", broken)
    assert __main__.main(["doctor", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "rms_norm               torch            WRONG: rms_norm: backend 'torch'" in printed
    assert "1 of the chosen kernels do not work" in printed


def test_this_machine_is_described() -> None:
    described = machine.describe("cpu")
    assert described.arch == "cpu"
    assert all(version for version in described.versions.values())


def test_pip_lines_and_pinned_sets_name_the_same_versions() -> None:
    root = Path(__file__).parents[2]
    constraints = (root / "constraints" / "cuda-torch211.txt").read_text("utf-8").splitlines()
    pinned = {line for line in constraints if not line.startswith("#")}
    lines = " ".join(package.install for package in machine.PACKAGES.values()).split()
    imported = {"torch-c-dlpack-ext", "z3-solver", "cloudpickle", "ml-dtypes", "tqdm", "psutil"}  # by libraries alone
    assert {line.partition("==")[0] for line in pinned if line not in lines} == imported
    extra = tomllib.loads((root / "kernels" / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    names = {line.partition("==")[0].partition(">=")[0] for line in extra["cuda"]}
    assert names == {"fa3-fwd", "sgl-deep-gemm", "sgl-flash-mla", "torch", "triton"}
    assert {line for line in extra["cuda"] if line in lines} == {"fa3-fwd==0.0.3", "sgl-flash-mla==1.0.0"}
    assert machine.PACKAGES["tilelang"].install == extra["tilelang"][0]
