"""Compiled kernels on disk, so that each instance is compiled once on a machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightjar.kernels.cuda import nvrtc
from nightjar.kernels.cuda.kernel import Kernel

PREBUILT = "NIGHTJAR_PREBUILT_KERNELS"
"""Environment variable: a folder that `prebuild` filled, perhaps on another machine."""

COMPILER = "compiler.txt"
"""In such a folder: the version of NVRTC that filled it."""


def cubin(kernel: Kernel, arch: str, folder: Path) -> tuple[Path, str]:
    """The compiled kernel's file and its symbol in it; compiled now if it is not there.

    A prebuilt one is taken first, whatever compiler this machine has: a driver loads the machine
    code of any compiler of its release.  The file's name holds a hash of everything that decides
    its content: the sources, the instance, the architecture, the compiler and its options.

    Raises:
        nvrtc.CompilationError, nvrtc.CompilerMissingError: see there.
    """
    if built := os.environ.get(PREBUILT):
        found = _prebuilt(kernel, arch, Path(built))
        if found is not None:
            return found
    path, symbols = _files(kernel, arch, str(nvrtc.version()), folder)
    if not (path.is_file() and symbols.is_file()):
        binary = nvrtc.compile_source(kernel.source, [kernel.expression], arch)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(symbols, binary.names[kernel.expression].encode())
        _write(path, binary.cubin)
    return path, symbols.read_text(encoding="utf-8")


def prebuild(arch: str, kernels: Iterable[Kernel], folder: Path) -> int:
    """Compile kernels into a folder on all cores; returns how many files of code it holds for them.

    Raises:
        nvrtc.CompilationError, nvrtc.CompilerMissingError: see there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / COMPILER, str(nvrtc.version()).encode())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return len(set(pool.map(lambda kernel: cubin(kernel, arch, folder)[0], kernels)))


def _prebuilt(kernel: Kernel, arch: str, folder: Path) -> tuple[Path, str] | None:
    """The kernel of a folder that was filled before, if it has the present sources'."""
    try:
        compiler = (folder / COMPILER).read_text(encoding="utf-8")
        path, symbols = _files(kernel, arch, compiler, folder)
        return (path, symbols.read_text(encoding="utf-8")) if path.is_file() else None
    except OSError:
        return None


def _files(kernel: Kernel, arch: str, compiler: str, folder: Path) -> tuple[Path, Path]:
    """Where the code and its symbol are, or will be."""
    path = folder / f"{kernel.entry}-{arch}-{_key(kernel, arch, compiler)}.cubin"
    return path, path.with_suffix(".symbol")


def _key(kernel: Kernel, arch: str, compiler: str) -> str:
    """128 bits over the inputs of a compilation."""
    digest = hashlib.blake2b(digest_size=16)
    headers = sorted(nvrtc.SOURCES.glob("*.cuh"))
    for path in (nvrtc.SOURCES / f"{kernel.source}.cu", *headers):
        digest.update(path.read_bytes())
    inputs = (kernel.expression, arch, compiler, *nvrtc.OPTIONS)
    digest.update("\0".join(inputs).encode())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: several processes of a host start at once."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
