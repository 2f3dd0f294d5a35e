"""Compiles the kernels for the processor they run on, once, at first use.

As with CuPy for CUDA, the sources are shipped and the result is kept in the user's cache.  A hash
of everything that it depends on names it.  Without a C++ compiler the torch references serve.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nightjar.kernels.cache_folder import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
SWITCH = "NIGHTJAR_CPU_KERNELS"
"""Environment variable: "torch" leaves the compiled kernels out; "native" requires them; unset or
"auto" uses them where they can be compiled."""

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
WIDE_FLAGS = {"x86_64": ("-mprefer-vector-width=512",)}
COMPILE_S = 300.0


class NativeBuildError(RuntimeError):
    """The kernels could not be compiled or loaded; the message says why."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where the torch references serve.

    Raises:
        NativeBuildError: The variable requires them and they cannot be compiled.
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "native", "torch"):
        raise NativeBuildError(f'{SWITCH}={wanted!r}: "auto", "native" or "torch"')
    if wanted == "torch":
        return None
    try:
        return load(cache_folder())
    except NativeBuildError as error:
        if wanted == "native":
            raise
        logger.warning("CPU kernels: %s; computing with torch, which is slower", error)
        return None


def identity() -> str:
    """Return a name for this processor's kernels; it differs for other processors and sources.

    Raises:
        NativeBuildError: See `library`.
    """
    kernels = library()
    # The file's name is the fingerprint of sources, compiler and processor.
    made = "torch" if kernels is None else Path(kernels._name).stem
    return f"{made}-{hashlib.sha256(_processor()).hexdigest()[:32]}"


def compiled() -> ctypes.CDLL:
    """Return the compiled kernels, for a wrapper whose `serves` has returned True.

    Raises:
        RuntimeError: There are none.
    """
    kernels = library()
    if kernels is None:
        raise RuntimeError("the compiled kernels are not there: ask `serves` first")
    return kernels


def load(folder: Path) -> ctypes.CDLL:
    """Load the kernels from `folder`; compile them first if they are missing or unreadable.

    Raises:
        NativeBuildError: No compiler, or it failed, or the folder cannot be written.
    """
    command = _command()
    path = folder / f"{_fingerprint(command)}.so"
    try:
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                logger.warning("compiling %s again: %s", path, error)
        _compile(command, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeBuildError(str(error)) from error


def found() -> tuple[str | None, bool]:
    """Return the compiler, or None without one, and whether the kernels are compiled already.

    Nothing is compiled.
    """
    try:
        command = _command()
    except NativeBuildError:
        return None, False
    return command[0], (cache_folder() / f"{_fingerprint(command)}.so").is_file()


def _command() -> list[str]:
    """Return the compiler and its flags: $CXX, else c++."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        raise NativeBuildError(f"no C++ compiler ({' '.join(command)}): install g++ or set CXX")
    return [*command, *FLAGS, *WIDE_FLAGS.get(platform.machine(), ())]


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _fingerprint(command: list[str]) -> str:
    """Return a name for these sources, compiled with this compiler on this processor."""
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, check=False, timeout=COMPILE_S
    ).stdout
    parts = [version, " ".join(command).encode(), _processor()]
    parts += [path.read_bytes() for path in [*_sources(), *sorted(SOURCES.glob("*.h"))]]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _processor() -> bytes:
    """Return what `-march=native` depends on; machines of several kinds may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(
        sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))})
    )


def _compile(command: list[str], path: Path) -> None:
    """Compile all sources into the library `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        out = Path(scratch) / path.name
        try:
            done = subprocess.run(
                [*command, *map(str, _sources()), "-o", str(out)],
                capture_output=True,
                text=True,
                check=False,
                timeout=COMPILE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"{command[0]} took more than {COMPILE_S:.0f} s") from error
        if done.returncode != 0:
            raise NativeBuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
        out.replace(path)
