"""The proof of backends notices what it is there to notice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_kernels import fp8_quant, index_topk, mla_slots, proof, rms_norm, swiglu_quant
from baleen_kernels.registry import Backend, Op

if TYPE_CHECKING:
    from collections.abc import Callable


def _with_backend(op: Op[Any], call: Callable[..., Any]) -> Op[Any]:
    """A copy of the op, outside of the registry, whose backend "changed" is the call."""
    copied = object.__new__(Op)
    for name in Op.__slots__:
        object.__setattr__(copied, name, getattr(op, name))
    object.__setattr__(copied, "backends", {"changed": Backend("changed", call)})
    return copied


def _check(op: Op[Any], call: Callable[..., Any], case: Any) -> None:
    proof.check_case(_with_backend(op, call), "changed", op.make_inputs(case), device="cpu")


def _one_nan(out: torch.Tensor) -> torch.Tensor:
    out[0, 3] = torch.nan
    return out


def _unwritten_row(out: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(out)
    fresh[1:] = out[1:]
    return fresh


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out + 1e-3, "differ, by up to"),
        (_one_nan, "1 of 480 numbers are NaN"),
        (_unwritten_row, "96 of 480 numbers are NaN"),
        (lambda out: out.double(), "is torch.float64"),
        (lambda out: out[1:], r"is torch.float32 \(4, 96\)"),
        (lambda out: (out, out), "returns 4 tensors, not 3"),
    ],
)
def test_wrong_floats_are_noticed(change: Any, message: str) -> None:
    case = next(case for case in rms_norm.CASES if case.name == "tokens")
    _check(rms_norm.OP, rms_norm.OP.pick("torch"), case)
    with pytest.raises(proof.WrongResultError, match=message):
        _check(rms_norm.OP, lambda **inputs: change(rms_norm.OP.pick("torch")(**inputs)), case)


def test_an_input_that_is_written_to_is_noticed() -> None:
    def call(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        out = rms_norm.OP.pick("torch")(x, weight, eps=eps)
        x.add_(1.0)
        return out

    with pytest.raises(proof.WrongResultError, match="tensor 1: 480 of 480 numbers differ"):
        _check(rms_norm.OP, call, rms_norm.CASES[1])


def test_a_failing_library_is_a_wrong_result() -> None:
    def call(**_: Any) -> torch.Tensor:
        raise RuntimeError("t.is_cuda() failed")

    with pytest.raises(proof.WrongResultError, match=r"'changed' failed: RuntimeError: t\.is_cuda"):
        _check(rms_norm.OP, call, rms_norm.CASES[1])


def test_wrong_integers_are_noticed() -> None:
    def call(**inputs: Any) -> torch.Tensor:
        return index_topk.OP.pick("torch")(**inputs).flip(-1)

    with pytest.raises(proof.WrongResultError, match="numbers differ"):
        _check(index_topk.OP, call, index_topk.CASES[0])


def test_narrow_floats_are_compared_by_their_relative_error() -> None:
    case = next(case for case in mla_slots.CASES if case.name == "half_the_heads")

    def scaled(factor: float) -> Any:
        return lambda **inputs: (mla_slots.OP.pick("torch")(**inputs).float() * factor).bfloat16()

    _check(mla_slots.OP, scaled(1.001), case)
    with pytest.raises(proof.WrongResultError, match="relative error 2"):
        _check(mla_slots.OP, scaled(1.02), case)


@pytest.mark.parametrize(("step", "count", "passes"), [(1, 20, True), (1, 200, False), (2, 1, False)])
def test_few_bytes_may_round_to_a_neighbour(step: int, count: int, passes: bool) -> None:
    """Of 2560 numbers 2 % are 51."""
    case = next(case for case in swiglu_quant.CASES if case.name == "all_rows")

    def call(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = swiglu_quant.OP.pick("torch")(**inputs)
        codes = values.view(torch.uint8).flatten()
        codes[(codes & 0x7F > 0x40).nonzero()[:count, 0]] -= step
        return values, scales

    if passes:
        _check(swiglu_quant.OP, call, case)
    else:
        with pytest.raises(proof.WrongResultError, match=r"bytes differ|further than one step"):
            _check(swiglu_quant.OP, call, case)


@pytest.mark.parametrize(("near", "passes"), [(0.1, True), (8.0, False)])
def test_a_number_near_zero_may_move_further(near: float, passes: bool) -> None:
    """By four steps, which near 0.1 are 0.05 and near 8 are 4."""
    case = next(case for case in swiglu_quant.CASES if case.name == "all_rows")

    def call(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = swiglu_quant.OP.pick("torch")(**inputs)
        codes, sizes = values.view(torch.uint8).flatten(), values.float().abs().flatten()
        codes[((sizes > near) & (sizes < 2 * near)).nonzero()[0, 0]] += 4
        return values, scales

    if passes:
        _check(swiglu_quant.OP, call, case)
    else:
        with pytest.raises(proof.WrongResultError, match="further than one step"):
            _check(swiglu_quant.OP, call, case)


def test_bytes_of_an_op_that_sums_nothing_are_exact() -> None:
    def call(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = fp8_quant.OP.pick("torch")(**inputs)
        values.view(torch.uint8)[0, 0] += 1
        return values, scales

    with pytest.raises(proof.WrongResultError, match="1 of 1280 bytes differ"):
        _check(fp8_quant.OP, call, fp8_quant.CASES[0])


def test_a_backend_that_takes_no_case_is_not_proven() -> None:
    op = _with_backend(rms_norm.OP, rms_norm.OP.pick("torch"))
    op.backends["changed"] = replace(op.backends["changed"], rejects=lambda **_: "no")
    with pytest.raises(proof.WrongResultError, match="takes none of the cases"):
        proof.prove(op, "changed", device="cpu")


def test_poison_is_gone_afterwards() -> None:
    with proof.poisoned_memory():
        assert torch.empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
