"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

# The instructions that decide which kernels the systems choose.
TELLING_FLAGS = [
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
]


def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, platform.processor())


def has_bf16() -> bool:
    """Whether the processor multiplies in bf16; others only emulate it, slower than fp32."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo("flags").split())


def describe(threads: int, *, with_torch: bool = True) -> dict[str, Any]:
    """Processor, memory, versions; `load_before` is the load average when this is called.

    with_torch: import it and say what it makes of the processor; it takes 200 MiB.
    """
    of_torch = {}
    if with_torch:
        import torch  # noqa: PLC0415

        of_torch = {
            "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        }
    flags = set(_cpuinfo("flags").split())
    return {
        "cpu": _cpuinfo("model name"),
        "cores": psutil.cpu_count(),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": threads,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    } | of_torch
