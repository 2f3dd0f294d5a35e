"""From .cu to shared object: g++, the host's headers and its runtime, cached by content."""

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_INCLUDE = _HERE / "include"
_RUNTIME = _HERE / "runtime"

_COMMON_FLAGS = ("-fPIC", "-fno-exceptions", "-fvisibility=hidden", f"-I{_INCLUDE}")
_KERNEL_FLAGS = (
    *_COMMON_FLAGS,
    "-O1",
    "-g",
    "-fsanitize=thread,bounds-strict,alignment",
    # One module's shared variables must not become another's of the same name.
    "-fno-gnu-unique",
    # `extern __shared__` arrays are plain memory.
    "-fno-extern-tls-init",
    "-Wno-unknown-pragmas",
)
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-std=c++17", "-O2", "-DCUDA_HOST_BUILTIN=")
_GPU_ONLY = ("-arch", "--gpu-architecture", "--use_fast_math", "-lineinfo", "--generate-line-info")

# What `extern "C" __global__` reads after the preprocessor (include/cuda_host/qualifiers.h).
_KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\(\(noinline, noclone\)\)\s+void\s+(\w+)\s*\(')
_SECTION = re.compile(r"\t\.(section|text|data|bss)\b")
_TLS_USE = re.compile(r"\b([A-Za-z_]\w*)@(?:tlsgd|tlsld|gottpoff|dtpoff|tpoff)")
_RED_ZONE_BYTES = 64


class CompileError(Exception):
    """The source does not compile for the host; the message is the compiler's."""


def build(source: str, name: str, options: Sequence[str], names: Sequence[str]) -> "Built":
    """Compile one translation unit.

    Args:
        source: CUDA C++.
        name: The file that messages and reports name; its folder is searched for includes.
        options: As NVRTC takes them; those for the GPU alone are dropped.
        names: Name expressions of kernels; `extern "C"` kernels are found without.

    Raises:
        CompileError: The compiler's messages.
        ValueError: An option that the host does not know.
    """
    flags = host_flags(options)
    text = _preprocess(source, name, flags)
    kernels = list(dict.fromkeys([*_KERNEL.findall(text), *names]))
    if not kernels:
        raise CompileError(f'{name}: no `extern "C" __global__` kernel and no name expression')
    text += _entry_points(kernels)
    runtime = _runtime()
    key = _digest(text, *flags, *_KERNEL_FLAGS, str(_RED_ZONE_BYTES), runtime.stem, _gcc_version())
    library = _cache() / f"{key}.so"
    if not library.exists():
        _compile(text, flags, runtime, library)
    return Built(library, kernels)


class Built:
    """A compiled module: its shared object and the kernels in it, in order of their numbers."""

    def __init__(self, library: Path, kernels: Sequence[str]) -> None:
        self.library = library
        self.kernels = list(kernels)


def host_flags(options: Sequence[str]) -> list[str]:
    """NVRTC's options as g++ takes them.

    Raises:
        ValueError: Neither a macro, an include folder, a standard, nor known to be GPU-only.
    """
    flags = []
    for option in options:
        if option.startswith(_GPU_ONLY):
            continue
        if option.startswith(("--std=", "-std=")):
            flags.append(f"-std={option.partition('=')[2]}")
        elif option.startswith(("-D", "-U", "-I")) and len(option) > 2:
            flags.append(option)
        else:
            raise ValueError(
                f"option {option!r}: the host takes -DNAME=VALUE, -UNAME, -Ifolder (each in one "
                f"string) and --std=, and drops {', '.join(_GPU_ONLY)}"
            )
    return flags if any(flag.startswith("-std=") for flag in flags) else ["-std=c++17", *flags]


def _preprocess(source: str, name: str, flags: Sequence[str]) -> str:
    folder = Path(name).resolve().parent
    command = ["g++", "-E", "-x", "c++", *flags, f"-I{_INCLUDE}", f"-iquote{folder}"]
    try:
        text = _run([*command, "-include", "cuda_host.h", "-"], source).stdout
    except CompileError as error:
        raise CompileError(str(error).replace("<stdin>", name)) from None
    # Clones of the repository have one cache: where they lie changes nothing.
    return text.replace('"<stdin>"', f'"{name}"').replace(f'"{_ROOT}/', '"')


def _entry_points(kernels: Sequence[str]) -> str:
    lines = ['\n# 1 "entry points of the CUDA host"']
    for number, kernel in enumerate(kernels):
        lines.append(f"CUDA_HOST_EXPORT void cuda_host_call_{number}(void* const* arguments) {{")
        lines.append(f"  cuda_host::call(&{kernel}, arguments); }}")
        lines.append(f"CUDA_HOST_EXPORT const cuda_host::Parameter* cuda_host_parameters_{number}")
        lines.append(f"  () {{ return cuda_host::parameters(&{kernel}); }}")
    export = 'extern "C" __attribute__((visibility("default")))'
    return "\n".join(lines).replace("CUDA_HOST_EXPORT", export) + "\n"


def _compile(text: str, flags: Sequence[str], runtime: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        assembly, made = Path(folder, "kernel.s"), Path(folder, "kernel.so")
        unit = Path(folder, "kernel.ii")
        unit.write_text(text, encoding="utf-8")
        _run(["g++", *flags, *_KERNEL_FLAGS, "-S", "-o", str(assembly), str(unit)])
        assembly.write_text(_with_red_zones(assembly.read_text(encoding="utf-8")), encoding="utf-8")
        link = [
            "g++",
            "-shared",
            "-Wl,-Bsymbolic,-z,defs",
            "-o",
            str(made),
            str(assembly),
            str(runtime),
        ]
        _run(link)
        made.replace(library)  # at once: other processes see all of it or nothing


def _with_red_zones(assembly: str) -> str:
    """Put unused bytes behind every shared variable, and dynamic shared memory behind its names.

    Static shared arrays lie side by side in thread-local storage. Without a gap, an access past
    the end of one through a pointer would be a good access to the next.
    """
    lines, in_tls, defined = [], False, set()
    for line in assembly.splitlines():
        if _SECTION.match(line):
            in_tls = line.startswith("\t.section\t.tbss")
        lines.append(line)
        if in_tls and not line.startswith("\t") and line.endswith(":"):
            defined.add(line[:-1])
        elif in_tls and line.startswith("\t.zero\t"):
            lines.append(f"\t.zero\t{_RED_ZONE_BYTES}")
    dynamic = sorted(set(_TLS_USE.findall(assembly)) - defined)
    lines += [f"\t.set\t{name}, cuda_host_dynamic_shared" for name in dynamic]
    return "\n".join(lines) + "\n"


@functools.cache
def _runtime() -> Path:
    """The runtime as one relocatable object."""
    files = sorted(_RUNTIME.glob("*.cpp"))
    headers = [*sorted(_RUNTIME.glob("*.h")), *sorted(_INCLUDE.rglob("*.h"))]
    contents = [file.read_text(encoding="utf-8") for file in [*files, *headers]]
    key = _digest(*contents, *_RUNTIME_FLAGS, _gcc_version())
    made = _cache() / f"runtime-{key}.o"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            unit, built = Path(folder, "runtime.cpp"), Path(folder, "runtime.o")
            unit.write_text("".join(f'#include "{file}"\n' for file in files), encoding="utf-8")
            _run(["g++", *_RUNTIME_FLAGS, "-c", "-o", str(built), str(unit)])
            built.replace(made)
    return made


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "nightjar", "cuda_host")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _gcc_version() -> str:
    return _run(["g++", "-dumpfullversion"]).stdout.strip()


def _digest(*parts: str) -> str:
    placed = "\0".join(parts).replace(f"-I{_ROOT}/", "-I")
    return hashlib.sha256(placed.encode()).hexdigest()[:24]


def _run(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    return done
