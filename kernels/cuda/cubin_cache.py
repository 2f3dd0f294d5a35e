"""Compiled kernels on disk, so that each instance is compiled once on a machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from nightjar.kernels.cuda import nvrtc
from nightjar.kernels.cuda.kernel import Kernel


def cubin(kernel: Kernel, arch: str, folder: Path) -> tuple[Path, str]:
    """The compiled kernel's file and its symbol in it; compiled now if it is not there.

    The file's name holds a hash of everything that decides its content: the sources, the instance,
    the architecture, the compiler and its options.

    Raises:
        nvrtc.CompilationError, nvrtc.CompilerMissingError: see there.
    """
    path = folder / f"{kernel.entry}-{arch}-{_key(kernel, arch)}.cubin"
    symbols = path.with_suffix(".symbol")
    if not (path.is_file() and symbols.is_file()):
        binary = nvrtc.compile_source(kernel.source, [kernel.expression], arch)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(symbols, binary.names[kernel.expression].encode())
        _write(path, binary.cubin)
    return path, symbols.read_text(encoding="utf-8")


def _key(kernel: Kernel, arch: str) -> str:
    """128 bits over the inputs of a compilation."""
    digest = hashlib.blake2b(digest_size=16)
    headers = sorted(nvrtc.SOURCES.glob("*.cuh"))
    for path in (nvrtc.SOURCES / f"{kernel.source}.cu", *headers):
        digest.update(path.read_bytes())
    inputs = (kernel.expression, arch, str(nvrtc.version()), *nvrtc.OPTIONS)
    digest.update("\0".join(inputs).encode())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: several processes of a host start at once."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
