"""What a machine has, and what a backend needs of it. Looks only; imports no kernel library and changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that carries kernels.

    module: what is imported. distribution: what pip calls it. install: arguments of `pip install`.
    broken: versions that install but do not work with the given reason.
    """

    module: str
    distribution: str
    install: str
    broken: Mapping[str, str] = field(default_factory=dict)


_WRONG_ABI = "is built for another version of PyTorch and misreads every tensor"

PACKAGES: Mapping[str, Package] = {
    "triton": Package("triton", "triton", "triton"),
    "flash_mla": Package("flash_mla", "sgl-flash-mla", "--no-deps sgl-flash-mla==1.0.0"),
    "deep_gemm": Package(
        "deep_gemm",
        "sgl-deep-gemm",
        "--no-deps sgl-deep-gemm==0.1.4.post1 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext",
        broken={"0.1.7": _WRONG_ABI, "0.2.0": _WRONG_ABI},
    ),
    "fa3": Package("fa3_fwd", "fa3-fwd", "--no-deps fa3-fwd==0.0.3"),
    "vllm_flash_attn": Package("vllm.vllm_flash_attn", "vllm", "vllm==0.26.0"),
    "tilelang": Package("tilelang", "tilelang", "tilelang==0.1.15"),
    "flashinfer": Package("flashinfer", "flashinfer-python", "flashinfer-python"),
    "aiter": Package("aiter", "aiter", "aiter"),
    "torch_npu": Package("torch_npu", "torch-npu", "torch-npu"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """One device and the software around it.

    arch: "cpu", "sm90", "sm100", "gfx942", "npu". versions: version by package key, absent if not installed.
    tools: programs that were found, by name. memory_bytes: of the device; 0 for a CPU.
    """

    arch: str
    name: str
    memory_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """Empty fields need nothing. `arch_note` completes the sentence "it needs ...", for the operator."""

    archs: Sequence[str] = ()
    arch_note: str = ""
    packages: Sequence[str] = ()
    tools: Sequence[str] = ()
    unwritten: str = ""

    def missing(self, machine: Machine) -> str | None:
        """The first thing that the machine lacks, as a clause with its remedy; None if it has everything."""
        if self.archs and machine.arch not in self.archs:
            return f"it needs {self.arch_note or ' or '.join(self.archs)}, and this is {machine.name} ({machine.arch})"
        for key in self.packages:
            package = PACKAGES[key]
            version = machine.versions.get(key)
            if version is None:
                return f"the package {package.distribution} is not installed: pip install {package.install}"
            if version in package.broken:
                return f"{package.distribution} {version} {package.broken[version]}: pip install {package.install}"
        for tool in self.tools:
            if tool not in machine.tools:
                return f"{tool} was not found: install the CUDA toolkit 12.8 or later, or set CUDA_HOME to it"
        return self.unwritten or None


ANYWHERE = Needs()
HOPPER = ("sm90",)
HOPPER_OR_BLACKWELL = ("sm90", "sm100", "sm103")
NVIDIA = ("sm89", *HOPPER_OR_BLACKWELL)
CDNA = ("gfx942", "gfx950")
ANY_TRITON = Needs(
    archs=("sm80", "sm86", *NVIDIA, "sm120", *CDNA),
    arch_note="an NVIDIA GPU of compute capability 8.0 or later, or an AMD Instinct GPU",
    packages=("triton",),
)
TRITON = Needs(archs=NVIDIA, arch_note="an NVIDIA GPU of compute capability 8.9 or later", packages=("triton",))


def describe(device: str = "auto") -> Machine:
    """The machine as it is. `device` "cpu" leaves its accelerators out of account."""
    versions = {key: version for key, package in PACKAGES.items() if (version := _version(package)) is not None}
    nvcc = find_nvcc()
    tools = {"nvcc": str(nvcc)} if nvcc else {}
    import torch

    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"sm{properties.major}{properties.minor}"
        arch = properties.gcnArchName.split(":")[0] if torch.version.hip else capability
        return Machine(arch, properties.name, properties.total_memory, versions, tools)
    return Machine("cpu", "a CPU", 0, versions, tools)


def find_nvcc() -> Path | None:
    """The CUDA compiler: below CUDA_HOME if set, else on the PATH, else in the usual place."""
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        return nvcc if nvcc.exists() else None
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return Path(found) if Path(found).exists() else None


def _version(package: Package) -> str | None:
    """None unless both the distribution and the module are there."""
    try:
        version = importlib.metadata.version(package.distribution)
        found = importlib.util.find_spec(package.module) is not None
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return None
    return version if found else None
