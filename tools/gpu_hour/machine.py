"""What the machine has: versions, the flash attention that the engine calls, compiled kernels."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from benchmarks.machine import describe_device
from nightjar.kernels.cuda import nvrtc
from nightjar.kernels.cuda.catalogue import all_kernels
from nightjar.kernels.cuda.cubin_cache import prebuild

if TYPE_CHECKING:
    from .stages import Run

FLASH_ARGUMENTS = {
    "query",
    "key",
    "value",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
    "return_debug_mask",
    "scale",
}
"""What kernels/cuda/varlen.py gives torch's flash attention."""


def versions() -> list[str]:
    """A line each."""
    found = describe_device("cuda" if torch.cuda.is_available() else "cpu")
    packages = found.pop("versions")
    lines = [f"- {name}: {value}" for name, value in found.items()]
    return lines + [f"- {name}: {value or 'not installed'}" for name, value in packages.items()]


def flash_attention_fault() -> str | None:
    """What of torch's flash attention is not as the engine calls it; None if all is."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    missing = FLASH_ARGUMENTS - {argument.name for argument in schema.arguments}
    if missing:
        return f"torch {torch.__version__}: flash attention has no {', '.join(sorted(missing))}"
    order = [argument.name for argument in schema.arguments][:10]
    if set(order) != FLASH_ARGUMENTS - {"scale"}:
        return f"torch {torch.__version__}: flash attention takes {', '.join(order)} first"
    return None


def gpus() -> int:
    """How many this machine has."""
    return torch.cuda.device_count()


def architecture() -> str:
    """Of this machine's GPU; of an H200 where there is none."""
    if not torch.cuda.is_available():
        return "sm_90"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def prebuilt(run: Run) -> tuple[str, bool]:
    """Make every kernel available before the tests; a sentence about it, and whether all are.

    In a dry run nothing is compiled: the host has its own compiler.
    """
    kernels, arch = list(all_kernels()), architecture()
    if run.dry:
        return f"{len(kernels)} kernels for {arch}: not compiled in a dry run", True
    started = time.monotonic()
    try:
        compiled = prebuild(arch, kernels, run.cubins)
    except (nvrtc.CompilationError, nvrtc.CompilerMissingError) as error:
        return f"the kernels cannot be compiled: {str(error)[:500]}", False
    took = time.monotonic() - started
    there = f"{len(kernels) - compiled} of {len(kernels)} kernels for {arch} were prebuilt"
    return f"{there}, {compiled} compiled in {took:.0f} s", True
