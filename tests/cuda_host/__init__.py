"""CUDA kernels on the CPU, for tests: see docs/explanations/cuda-host.md."""

from .compiler import CompileError
from .findings import Finding, KernelFault
from .module import Kernel, RawModule, schedule
from .requirements import missing_tools, require_tools

__all__ = [
    "CompileError",
    "Finding",
    "Kernel",
    "KernelFault",
    "RawModule",
    "missing_tools",
    "require_tools",
    "schedule",
]
