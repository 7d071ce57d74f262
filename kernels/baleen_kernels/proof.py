"""Whether a backend's results are right: the comparison that start-up, tests and benchmarks share.

An import proves nothing: libraries built for another PyTorch load and then misread tensors. So a backend is only used
after a small call on this machine came out like the op's float32 reference.

Rules: shapes and dtypes are equal. NaN stands exactly where the reference has it. Integers and booleans are equal.
FP8 numbers and bytes are equal, or, for an op that sums before it rounds, differ in few places (`Op.byte_flips`), FP8
numbers to a neighbour or, near zero where neighbours lie closer than sums are exact, by 2^-11 of the largest number.
Floats of a call in float32 are within `atol` and `rtol`; of a call with bfloat16 or FP8 inputs, within a relative error
of `bf16_error`. Memory handed out uninitialised is filled with NaN during the call, so that what was not written
shows.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from baleen_kernels.registry import Op

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
# A number of eight bits that was rounded the other way moves a sum of 128 by 2^-11 of the largest e4m3 number, 448.
_NEAR_ZERO = 448 / 2**11


class WrongResultError(ValueError):
    """A backend ran and its result is not that of the reference, or it did not run at all."""


def prove(op: Op[Any], backend: str, *, device: str, like: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> str:
    """Runs the first case that the backend takes on the device; returns its name. WrongResultError if it fails.

    `like`: whether inputs are of the kind that the backend is meant for, where an op has several.
    """
    entry = op.entry(backend)
    for case in op.cases:
        inputs = op.make_inputs(case)
        if like(inputs) and entry.rejection(inputs) is None and any(_size(value) for value in inputs.values()):
            check_case(op, backend, inputs, device=device)
            return case.name
    raise WrongResultError(f"{op.name}: backend {backend!r} takes none of the cases, so it cannot be checked")


def check_case(op: Op[Any], backend: str, inputs: Mapping[str, Any], *, device: str) -> None:
    """Compares one call with the reference. WrongResultError, with the first difference, if they differ."""
    expected = results(op, op.reference, copy.deepcopy(dict(inputs)))
    with poisoned_memory():
        try:
            actual = results(op, op.pick(backend), move(copy.deepcopy(dict(inputs)), device))
        except Exception as error:
            raise WrongResultError(f"{op.name}: backend {backend!r} failed: {type(error).__name__}: {error}") from error
    if len(actual) != len(expected):
        raise WrongResultError(f"{op.name}: backend {backend!r} returns {len(actual)} tensors, not {len(expected)}")
    narrow = any(isinstance(value, Tensor) and value.dtype in _NARROW for value in inputs.values())
    for place, (got, want) in enumerate(zip(actual, expected, strict=True)):
        problem = difference(op, got.cpu(), want, narrow=narrow)
        if problem is not None:
            raise WrongResultError(f"{op.name}: backend {backend!r}, tensor {place}: {problem}")


def results(op: Op[Any], call: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The call's outputs, and its tensor arguments after it: an op may only change what its contract says."""
    result = call(**inputs)
    outputs = [result] if isinstance(result, Tensor) else [item for item in result or () if item is not None]
    outputs += [value for value in inputs.values() if isinstance(value, Tensor)]
    return outputs if op.canonical is None else op.canonical(inputs, outputs)


def move(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The inputs with their tensors on the device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, PyTorch fills memory that it hands out uninitialised with NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # The public switch does the same, and imports PyTorch's compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some op is not deterministic is of no interest here
            yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def difference(op: Op[Any], got: Tensor, want: Tensor, *, narrow: bool) -> str | None:
    """What is wrong with `got`, both on the host; None if nothing is."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if want.dtype in (torch.float8_e4m3fn, torch.uint8):
        return _byte_difference(op, got, want)
    if not want.is_floating_point():
        wrong = int((got != want).sum())
        return f"{wrong} of {want.numel()} numbers differ" if wrong else None
    if not torch.equal(got.isnan(), want.isnan()):
        return f"{int((got.isnan() != want.isnan()).sum())} of {want.numel()} numbers are NaN where they should not be"
    if narrow or want.dtype in _NARROW:
        return _norm_difference(got.float().nan_to_num(), want.float().nan_to_num(), op.bf16_error)
    close = torch.isclose(got, want, atol=op.atol, rtol=op.rtol, equal_nan=True)
    if bool(close.all()):
        return None
    worst = (got - want).abs().nan_to_num(posinf=torch.inf).max()
    return f"{int((~close).sum())} of {want.numel()} numbers differ, by up to {worst:.2e}"


def _byte_difference(op: Op[Any], got: Tensor, want: Tensor) -> str | None:
    codes, wanted = got.view(torch.uint8).int(), want.view(torch.uint8).int()
    differ = codes != wanted
    count = int(differ.sum())
    if count > op.byte_flips * want.numel():
        return f"{count} of {want.numel()} bytes differ"
    if want.dtype == torch.float8_e4m3fn:
        # Neighbours have adjacent codes.
        apart = ((codes - wanted).abs() > 1) & ((got.float() - want.float()).abs() > _NEAR_ZERO)
        if bool(apart.any()):
            return f"{int(apart.sum())} FP8 numbers are further than one step from the reference"
    return None


def _norm_difference(got: Tensor, want: Tensor, limit: float) -> str | None:
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]):
        return "infinities are not where they should be"
    error = (got - want)[finite].double().norm() / want[finite].double().norm().clamp(min=1e-30)
    return None if error <= limit else f"relative error {error:.2e}, more than {limit:.0e}"


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0
