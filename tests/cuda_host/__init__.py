"""CUDA kernels on the CPU, for tests: see docs/cuda-host.md."""

from .compiler import CompileError, missing_tools
from .findings import Finding, KernelFault
from .module import Kernel, RawModule, schedule

__all__ = [
    "CompileError",
    "Finding",
    "Kernel",
    "KernelFault",
    "RawModule",
    "missing_tools",
    "schedule",
]
