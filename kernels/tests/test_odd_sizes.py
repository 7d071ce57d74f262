"""Every backend that this machine runs, on sizes that nobody chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from baleen_kernels import machine, proof, selection
from baleen_kernels.registry import OPS
from odd_sizes import DRAWS, draw

if TYPE_CHECKING:
    from collections.abc import Iterator

selection.load_ops()
MACHINE = machine.describe()
DEVICE = "cpu" if MACHINE.arch == "cpu" else "cuda"
NUM_DRAWS = {"cpu": 3, "cuda": 24}[DEVICE]


def _runs() -> Iterator[Any]:
    for name in DRAWS:
        for backend in OPS[name].backends.values():
            if backend.needs.missing(MACHINE) is None:
                marks = pytest.mark.gpu if DEVICE == "cuda" else ()
                yield pytest.param(name, backend.name, id=f"{name}-{backend.name}", marks=marks)


@pytest.mark.parametrize(("name", "backend"), tuple(_runs()))
def test_sizes_that_nobody_chose(name: str, backend: str) -> None:
    op, taken = OPS[name], 0
    for seed in range(NUM_DRAWS):
        inputs = draw(name, seed)
        if op.entry(backend).rejection(inputs) is None:
            try:
                proof.check_case(op, backend, inputs, device=DEVICE)
            except proof.WrongResultError as error:
                raise AssertionError(f"draw {seed}: {error}") from error
            taken += 1
    # Libraries of latent attention read one kind of pool, and selections of whole tiles.
    assert taken >= NUM_DRAWS // {"mla_slots": 6, "mla_pages": 4}.get(name, 2)


def test_every_op_of_our_own_is_drawn() -> None:
    """But those whose sizes are those of weights."""
    own = {op.name for op in OPS.values() if {"triton", "cuda"} & op.backends.keys()}
    assert own - DRAWS.keys() <= {"fp8_quant", "thin_gemm"}
