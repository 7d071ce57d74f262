"""Compiles our CUDA sources and loads them. Owns the cache of compiled libraries; launches nothing.

A source becomes a shared library with a plain C interface, called through ctypes: no PyTorch headers, so it compiles in
seconds, and no PyTorch ABI, so a library outlives an update of PyTorch. Libraries are kept by a hash of source,
headers and flags, in BALEEN_KERNEL_CACHE, by default ~/.cache/baleen/kernels; a folder `prebuilt` beside the sources
is looked into first. Files are renamed into place, so that several ranks may build at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from baleen_kernels.machine import find_nvcc

SOURCES = Path(__file__).parent
# wgmma and clusters need the architecture-specific target.
_ARCH_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)
_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *_ARCH_FLAGS)


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    chosen = os.environ.get("BALEEN_KERNEL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "baleen" / "kernels"


@functools.cache
def load(name: str, *defines: str) -> ctypes.CDLL:
    """The library of `name`.cu, compiled if need be. RuntimeError with the compiler's words if that fails."""
    source = SOURCES / f"{name}.cu"
    texts = [path.read_text("utf-8") for path in (source, *sorted(SOURCES.glob("*.cuh")))]
    digest = hashlib.sha256(" ".join([*texts, *_FLAGS, *defines]).encode()).hexdigest()[:16]
    file_name = f"{name}-{digest}.so"
    prebuilt = SOURCES / "prebuilt" / file_name
    built = prebuilt if prebuilt.exists() else cache_folder() / file_name
    if not built.exists():
        compile_source(source, built, defines)
    return ctypes.CDLL(str(built))


def compile_source(source: Path, target: Path, defines: tuple[str, ...] = ()) -> None:
    """Compiles into `target`; see `load`."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(f"{source.name} has to be compiled, but nvcc was not found: set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = [str(nvcc), *_FLAGS, *(f"-D{define}" for define in defines), "-o", str(output), str(source)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
        output.rename(target)


def check(code: int, what: str) -> None:
    """RuntimeError if a launch returned a CUDA error."""
    if code != 0:
        raise RuntimeError(f"{what} failed with CUDA error {code}")
