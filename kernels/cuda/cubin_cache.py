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


def cubin(kernel: Kernel, arch: str, folder: Path) -> tuple[Path, str]:
    """Return the compiled kernel's file and its symbol in it; compile the kernel if it is missing.

    A prebuilt kernel of any compiler is taken first, because a driver loads the machine code of any
    compiler of its release.  The file's name holds a hash of everything else that decides its
    content: the sources, the instance, the architecture and the compiler's options.

    Raises:
        nvrtc.CompilationError, nvrtc.CompilerMissingError: see there.
    """
    stem = f"{kernel.entry}-{arch}-{_key(kernel, arch)}-nvrtc"
    path = _prebuilt(stem)
    if path is None:
        path = folder / f"{stem}{'.'.join(map(str, nvrtc.version()))}.cubin"
    symbols = path.with_suffix(".symbol")
    if not (path.is_file() and symbols.is_file()):
        binary = nvrtc.compile_source(kernel.source, [kernel.expression], arch)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(symbols, binary.names[kernel.expression].encode())
        _write(path, binary.cubin)
    return path, symbols.read_text(encoding="utf-8")


def prebuild(arch: str, kernels: Iterable[Kernel], folder: Path) -> int:
    """Compile kernels into a folder, unless they are prebuilt; on all cores.

    Returns how many were compiled.

    Raises:
        nvrtc.CompilationError, nvrtc.CompilerMissingError: see there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.cubin"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {path for path, _ in pool.map(lambda one: cubin(one, arch, folder), kernels)}
    return len(found - before)


def _prebuilt(stem: str) -> Path | None:
    """Return the file of a prebuilt kernel of these sources, if a folder is named and has it."""
    named = os.environ.get(PREBUILT)
    found = sorted(Path(named).glob(f"{stem}*.cubin")) if named else []
    return next((path for path in found if path.with_suffix(".symbol").is_file()), None)


def _key(kernel: Kernel, arch: str) -> str:
    """128 bits over the inputs of a compilation."""
    digest = hashlib.blake2b(digest_size=16)
    headers = sorted(nvrtc.SOURCES.glob("*.cuh"))
    for path in (nvrtc.SOURCES / f"{kernel.source}.cu", *headers):
        digest.update(path.read_bytes())
    digest.update("\0".join((kernel.expression, arch, *nvrtc.OPTIONS)).encode())
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, because several processes of a host start at once."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)
