"""What a figure was measured on: processor or GPU, memory, versions.

It needs nothing but torch, so that it runs on a bare GPU machine.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

# The instructions that decide which kernels the systems choose.
TELLING_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8"),
)
PACKAGES = ("torch", "cupy-cuda13x", "transformers", "numpy", "triton", "nvidia-cuda-nvrtc")
QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, platform.processor())


def has_bf16() -> bool:
    """Whether the processor multiplies in bf16; others only emulate it, slower than fp32."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo("flags").split())


def describe(threads: int | None = None) -> dict[str, Any]:
    """Processor, memory, versions; `load_before` is the load average when this is called.

    threads: those that compute, unless all that torch uses.  What torch makes of the processor is
    told where it is loaded: it takes 200 MiB.
    """
    torch = sys.modules.get("torch")
    if threads is None:
        threads = torch.get_num_threads() if torch else os.cpu_count()
    flags = set(_cpuinfo("flags").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "cpu": _cpuinfo("model name"),
        "cores": os.cpu_count(),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags],
        "memory_gib": round(memory / 2**30, 1),
        "threads": threads,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    if torch:
        found["torch_capability"] = torch.backends.cpu.get_cpu_capability()
        found["torch"] = torch.__version__
    return found


def describe_device(device: str) -> dict[str, Any]:
    """Device, driver and versions, of a GPU or of the CPU that stands in for one."""
    import torch  # noqa: PLC0415

    installed = {one.name for one in distributions()}
    found = {
        "device": device,
        "python": platform.python_version(),
        "versions": {one: version(one) if one in installed else None for one in PACKAGES},
    }
    if device != "cuda":
        return found | {"name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"sm_{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> dict[str, str]:
    """Driver, highest clocks and power limit; empty where the program is not there."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY.split(","), values, strict=False))
