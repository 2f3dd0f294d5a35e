"""Modules and kernels with CuPy's interface, run on the CPU."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .arguments import Arguments, Parameter, ParameterLayout
from .compiler import build
from .findings import Finding, FindingLayout, KernelFault, RegionName, Reporter
from .symbols import read_symbols

_MAX_THREADS = 1024
_BUFFER, _SHARED, _VARIABLE, _COMPILER = range(4)  # cuda_host::Space
_one_launch = threading.Lock()  # equal sources are one library with one state
_seed: ContextVar[int] = ContextVar("cuda_host_seed", default=0)


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Run the launches inside in the random order of `seed`; 0 is in order of the threads."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


class _Region(ctypes.Structure):
    """`cuda_host::Region`."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("space", ctypes.c_uint32),
        ("read_only", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    """`cuda_host::Launch`."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint32),
    )


class RawModule:
    """CUDA source compiled for the CPU.

    Args:
        code: The source, as `cupy.RawModule` takes it; or
        path: a .cu file.
        options: `-D`, `-U`, `-I` and `--std=`, each in one string; GPU-only ones are dropped.
        name_expressions: Kernels to instantiate, such as `"norm<half>"`.

    Raises:
        CompileError: The source does not compile.
        ValueError: Not exactly one of code and path, or an unknown option.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | Path | None = None,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if (code is None) == (path is None):
            raise ValueError("RawModule takes either code or path")
        if path is not None:
            code = Path(path).read_text(encoding="utf-8")
        built = build(code or "", str(path or "kernel.cu"), options, name_expressions or ())
        self._path, self._names = built.library, built.kernels
        self._library = ctypes.CDLL(str(built.library))
        self._library.cuda_host_finding.restype = ctypes.POINTER(FindingLayout)
        self._library.cuda_host_dynamic_shared_address.restype = ctypes.c_void_p
        self._symbols = read_symbols(built.library)
        launch = ctypes.cast(self._library.cuda_host_launch, ctypes.c_void_p).value or 0
        self._load_address = launch - self._symbols.launch_offset

    def get_function(self, name: str) -> "Kernel":
        """A kernel by its `extern "C"` name or its name expression.

        Raises:
            KeyError: There is none; the message lists those there are.
        """
        if name not in self._names:
            known = ", ".join(self._names)
            raise KeyError(f"no kernel {name!r}; there are {known}; others by name_expressions")
        return Kernel(self, name, self._names.index(name))

    def _memory(self, shared_mem: int) -> list[tuple[_Region, RegionName]]:
        """Shared memory and variables; shared memory belongs to the thread that asks."""
        dynamic = self._library.cuda_host_dynamic_shared_address()
        base = dynamic - self._symbols.dynamic_offset
        found = []
        for symbol in self._symbols.shared:
            space = _COMPILER if symbol.is_compilers else _SHARED
            region = _Region(base + symbol.offset, symbol.n_bytes, space, 0)
            found.append((region, RegionName(f"shared memory {symbol.name}", symbol.n_bytes)))
        region = _Region(dynamic, shared_mem, _SHARED, 0)
        found.append((region, RegionName("dynamic shared memory", shared_mem)))
        for symbol in self._symbols.variables:
            region = _Region(self._load_address + symbol.offset, symbol.n_bytes, _VARIABLE, 0)
            found.append((region, RegionName(symbol.name, symbol.n_bytes)))
        return found


class Kernel:
    """A kernel of a module; call it as CuPy's kernels are called."""

    def __init__(self, module: RawModule, name: str, number: int) -> None:
        self.name = name
        self._module = module
        library = module._library
        self._entry = ctypes.cast(library[f"cuda_host_call_{number}"], ctypes.c_void_p)
        listed = library[f"cuda_host_parameters_{number}"]
        listed.restype = ctypes.POINTER(ParameterLayout)
        self._parameters = list(_parameters(listed()))

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: None = None,
    ) -> None:
        """Run the grid to its end.

        Args:
            grid: Blocks in x, y, z; what is left out is 1.
            block: Threads of a block.
            args: See `Arguments`.
            shared_mem: Bytes of dynamic shared memory.
            stream: For CuPy's sake; launches here are over when the call returns.

        Raises:
            KernelFault: The kernel did something wrong. Arrays hold what it wrote until then.
            TypeError: An argument does not fit the kernel's parameter.
            ValueError: A launch that no GPU would take.
        """
        sizes = (_three("grid", grid), _three("block", block))
        threads = sizes[1][0] * sizes[1][1] * sizes[1][2]
        if threads > _MAX_THREADS:
            raise ValueError(f"{self.name}: {threads} threads a block, at most {_MAX_THREADS}")
        if not 0 <= shared_mem <= 227 * 1024:
            raise ValueError(f"{self.name}: shared_mem={shared_mem}, must be 0 to 227 KiB")
        arguments = Arguments(self.name, self._parameters, args)
        with _one_launch:
            arguments.copy_in()
            findings = self._launch(sizes, arguments, shared_mem)
            arguments.copy_out()
        if findings:
            raise KernelFault(self.name, findings, _seed.get())

    def _launch(
        self, sizes: tuple[Sequence[int], Sequence[int]], arguments: Arguments, shared_mem: int
    ) -> list[Finding]:
        grid, block = sizes
        memory = self._module._memory(shared_mem)
        for buffer in arguments.buffers:
            region = _Region(buffer.copy_address, buffer.n_bytes, _BUFFER, buffer.read_only)
            memory.append((region, RegionName(" = ".join(buffer.names), buffer.n_bytes)))
        regions = (_Region * len(memory))(*(region for region, _ in memory))
        pointers = arguments.pointers()
        launch = _Launch(
            self._entry,
            ctypes.cast(pointers, ctypes.c_void_p),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block),
            _seed.get(),
            regions,
            len(memory),
        )
        library = self._module._library
        count = library.cuda_host_launch(ctypes.byref(launch))
        names = [name for _, name in memory]
        reporter = Reporter(self._module._path, self._module._load_address, names, grid, block)
        described = (reporter.describe(library.cuda_host_finding(i)[0]) for i in range(count))
        return [finding for finding in described if finding is not None]


def _parameters(listed: Any) -> Iterator[Parameter]:
    number = 0
    while (raw := listed[number]).kind != b"\0":
        yield Parameter(
            raw.kind.decode(),
            raw.pointee.decode(),
            bool(raw.read_only),
            raw.bytes,
            raw.pointee_bytes,
        )
        number += 1


def _three(what: str, given: Sequence[int]) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in given) + (1,) * (3 - len(given))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"{what} {tuple(given)}: up to three numbers of at least 1")
    return sizes
