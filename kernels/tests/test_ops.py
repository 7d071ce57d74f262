"""Every backend of every op against its float32 reference, on the cases that the op's file declares."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import baleen_kernels
import pytest
import torch
from baleen_kernels.registry import OPS, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

for _module in pkgutil.iter_modules(baleen_kernels.__path__):
    importlib.import_module(f"baleen_kernels.{_module.name}")


def _runs() -> Iterator[Any]:
    for op in OPS.values():
        for backend in op.backends:
            for case in op.cases:
                yield pytest.param(op, backend, case, id=f"{op.name}-{backend}-{case.name}")


def _results(call: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The call's outputs, and its tensor arguments after it: an op may only change what its contract says."""
    result = call(**inputs)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return outputs + [value for value in inputs.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("op", "backend", "case"), tuple(_runs()))
def test_backend_equals_reference(op: Op[Any], backend: str, case: Any) -> None:
    inputs = op.make_inputs(case)
    expected = _results(op.reference, copy.deepcopy(inputs))
    actual = _results(op.pick(backend), copy.deepcopy(inputs))
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.dtype == torch.float8_e4m3fn:
            got, want = got.view(torch.uint8), want.view(torch.uint8)
        torch.testing.assert_close(got, want, atol=op.atol, rtol=op.rtol, equal_nan=True)


def test_every_op_has_cases_and_a_torch_backend() -> None:
    assert len(OPS) >= 14
    for op in OPS.values():
        assert "torch" in op.backends, op.name
        assert len({case.name for case in op.cases}) == len(op.cases) > 1, op.name


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rms_norm' has no backend 'cuda'.*torch"):
        OPS["rms_norm"].pick("cuda")
