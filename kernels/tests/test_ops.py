"""Every backend of every op against its float32 reference, on the cases that the op's file declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from baleen_kernels import (
    fp8_quant,
    hadamard,
    index_key_pack,
    latent_pack,
    machine,
    moe_route,
    proof,
    selection,
)
from baleen_kernels.registry import OPS, Backend, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

selection.load_ops()
MACHINE = machine.describe()
DEVICE = "cpu" if MACHINE.arch == "cpu" else "cuda"


def _runs() -> Iterator[Any]:
    """Every backend that this machine can run, on every case that the backend takes."""
    for op in OPS.values():
        for backend in op.backends.values():
            if backend.needs.missing(MACHINE) is None:
                marks = pytest.mark.gpu if DEVICE == "cuda" else ()
                for case in op.cases:
                    yield pytest.param(op, backend, case, id=f"{op.name}-{backend.name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("op", "backend", "case"), tuple(_runs()))
def test_backend_equals_reference(op: Op[Any], backend: Backend[Any], case: Any) -> None:
    inputs = op.make_inputs(case)
    rejection = backend.rejection(inputs)
    if rejection is not None:
        pytest.skip(rejection)
    proof.check_case(op, backend.name, inputs, device=DEVICE)


def test_every_op_has_cases_and_a_torch_backend() -> None:
    assert len(OPS) >= 26
    for op in OPS.values():
        assert op.backends["torch"].rejects is None, op.name
        for backend in op.backends.values():
            written = not backend.needs.unwritten
            takes = [case for case in op.cases if backend.rejection(op.make_inputs(case)) is None]
            assert bool(takes) == written, f"{op.name}: {backend.name} takes {len(takes)} cases"
        assert len({case.name for case in op.cases}) == len(op.cases) > 1, op.name


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rms_norm' has no backend 'cuda'.*torch"):
        OPS["rms_norm"].pick("cuda")


def test_every_e4m3_number_is_widened_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    widened = fp8_quant.e4m3_to_float(numbers)
    torch.testing.assert_close(widened, numbers.float(), atol=0, rtol=0, equal_nan=True)
    assert widened.isnan().sum() == 2
    assert (widened.signbit() == numbers.float().signbit()).all()
    torch.testing.assert_close(fp8_quant.e4m3_to_float(numbers.T), widened.T, atol=0, rtol=0, equal_nan=True)


def test_written_keys_and_latents_are_read_back() -> None:
    """Packing, reading and packing again changes no byte; other slots of a page keep theirs."""
    g = torch.Generator().manual_seed(0)
    index_k, latent, rope = (torch.randn(6, width, generator=g) for width in (128, 512, 64))
    pages = torch.randint(0, 256, (3, index_key_pack.index_page_bytes(128)), generator=g, dtype=torch.uint8)
    before, slots = pages.clone(), torch.tensor([64, 70, 127, 128, 129, 191])
    index_key_pack.write_index_keys(pages, slots, index_k, scale_ue8m0=True)
    read = index_key_pack.read_index_keys(pages, slots, dtype=torch.float32)
    torch.testing.assert_close(read, index_k, atol=0, rtol=0.07)
    assert (read != index_k).any()
    index_key_pack.write_index_keys(before, slots, read, scale_ue8m0=True)
    assert torch.equal(before, pages)
    packed = latent_pack.pack_latent_fp8(latent, rope, scale_ue8m0=True)
    assert packed.shape == (6, 656)
    again = latent_pack.unpack_latent_fp8(packed, latent=512, rope=64, dtype=torch.float32)
    torch.testing.assert_close(again[0], latent, atol=0.01, rtol=0.07)
    assert torch.equal(again[1], rope.bfloat16().float())
    assert torch.equal(latent_pack.pack_latent_fp8(*again, scale_ue8m0=True), packed)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="does not divide a width of 192"):
        fp8_quant.quantize_groups(torch.zeros(1, 192), scale_ue8m0=True)
    weight = torch.zeros(192, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"needs scales \(2, 1\), got \(1, 2\)"):
        fp8_quant.dequantize_weight(weight, torch.ones(1, 2), dtype=torch.float32)
    with pytest.raises(ValueError, match="power of two, got a width of 24"):
        hadamard.hadamard(torch.zeros(1, 24))
    with pytest.raises(ValueError, match="at most 128 channels, got 256"):
        index_key_pack.index_page_bytes(256)
    with pytest.raises(ValueError, match="take 656 bytes, got 640"):
        latent_pack.unpack_latent_fp8(torch.zeros(1, 640, dtype=torch.uint8), latent=512, rope=64, dtype=torch.float32)
    options = {"num_groups": 2, "topk_groups": 1, "topk": 5, "normalize": True, "scaling_factor": 1.0}
    with pytest.raises(ValueError, match="1 groups of 4 experts hold fewer than 5"):
        moe_route.moe_route(torch.zeros(1, 8), torch.zeros(8), **options)
