"""NVIDIA's run-time compiler, called directly: it needs neither a GPU nor a driver.

The wheels nvidia-cuda-nvrtc and nvidia-cuda-runtime hold the library and the headers; a toolkit
under CUDA_PATH serves as well.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MAJOR = 13
"""The CUDA release of library and headers: a cubin runs with any driver of that release."""

SOURCES = Path(__file__).parent
OPTIONS = ("-std=c++17", "-Xptxas=-v")


class CompilerMissingError(RuntimeError):
    """NVRTC or the CUDA headers are not installed."""


class CompilationError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@dataclass(frozen=True, slots=True)
class Binary:
    """One source compiled for one architecture.

    cubin: machine code; names: the symbol of each asked name expression; log: what ptxas says of
    every kernel (see resources.py).
    """

    cubin: bytes
    names: dict[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class Toolkit:
    """The paths of NVRTC and of the headers."""

    library: Path
    include: Path

    @staticmethod
    @lru_cache(maxsize=1)
    def find() -> Toolkit:
        """The first one that is installed.

        Raises:
            CompilerMissingError: there is none.
        """
        looked = []
        for include, *libraries in _candidates():
            library = next((path for path in libraries if path.is_file()), None)
            if library is not None and (include / "cuda_fp16.h").is_file():
                return Toolkit(library, include)
            looked.append(str(include.parent))
        raise CompilerMissingError(
            f"NVRTC {MAJOR} and its headers were not found (looked in {', '.join(looked)}): "
            "install nvidia-cuda-nvrtc and nvidia-cuda-runtime, or set CUDA_PATH"
        )


def _candidates() -> Iterator[tuple[Path, ...]]:
    """Yield folders of headers, each with the possible paths of its library."""
    name = f"libnvrtc.so.{MAJOR}"
    roots = [Path(entry) / "nvidia" / f"cu{MAJOR}" for entry in sys.path if entry]
    toolkit = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    for root in (*roots, Path(toolkit)):
        yield root / "include", root / "lib" / name, root / "lib64" / name


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """NVRTC, with the types of what is called.

    NVRTC opens its library of built-in functions by name only.  That library is loaded first, so
    that it is found in any folder of wheels.
    """
    path = Toolkit.find().library
    for table in path.parent.glob(f"libnvrtc-builtins.so.{MAJOR}.*"):
        ctypes.CDLL(str(table), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> tuple[int, int]:
    """Of NVRTC: major, minor."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_source(name: str, expressions: Sequence[str], arch: str) -> Binary:
    """Compile kernels of `name`.cu.

    expressions: the wanted instances, as in C++ (`norm<float, __half, ...>`); arch: "sm_90".

    Raises:
        CompilationError: the source is wrong, or an expression names nothing.
        CompilerMissingError: see Toolkit.find.
    """
    library, program = _library(), ctypes.c_void_p()
    path = SOURCES / f"{name}.cu"
    source = path.read_bytes()
    _check(
        library.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None)
    )
    try:
        for expression in expressions:
            _check(library.nvrtcAddNameExpression(program, expression.encode()))
        includes = (f"-I{SOURCES}", f"-I{Toolkit.find().include}")
        options = [option.encode() for option in (f"-arch={arch}", *OPTIONS, *includes)]
        array = (ctypes.c_char_p * len(options))(*options)
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = _bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompilationError(f"{path.name} for {arch}: {log or _message(status)}")
        names = {expression: _lowered(program, expression) for expression in expressions}
        return Binary(_bytes(program, "CUBIN"), names, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _lowered(program: ctypes.c_void_p, expression: str) -> str:
    """The symbol of an instance."""
    symbol = ctypes.c_char_p()
    _check(_library().nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)))
    return (symbol.value or b"").decode()


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    """One of a compiled program's products."""
    size = ctypes.c_size_t()
    library = _library()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    """Raise what NVRTC returned, if it is an error."""
    if status:
        raise CompilationError(_message(status))


def _message(status: int) -> str:
    """NVRTC's name of a status."""
    text: bytes = _library().nvrtcGetErrorString(status)
    return text.decode()
