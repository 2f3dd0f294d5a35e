"""What a figure was measured on."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "cupy-cuda13x", "transformers", "numpy", "triton", "nvidia-cuda-nvrtc")
QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"


def describe(device: str) -> dict[str, Any]:
    """Device, driver and versions.

    Raises:
        RuntimeError: CUDA is asked for and torch sees none.
    """
    found: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    if device != "cuda":
        return found | {"name": platform.processor() or platform.machine()}
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device: use --device cpu to try the harness")
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"sm_{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
        "nvidia_smi": _nvidia_smi(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _nvidia_smi() -> dict[str, str]:
    """Driver, highest clocks and power limit; empty where the program is not there."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY.split(","), values, strict=False))
