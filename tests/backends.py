"""Running a test by each backend of the CPU ops.

`python -m tests.backends` compiles the kernels that the tests use.
"""

import os
import shutil
from types import ModuleType

import pytest
import torch

from nightjar.kernels import native
from nightjar.kernels.native.build import library

BACKENDS = ("torch", "native")
# GCC 12 finds an uninitialised variable in its own header of intrinsics.
STRICT_COMPILER = "c++ -Wall -Wextra -Werror -Wno-maybe-uninitialized -Wno-uninitialized"
"""A warning is an error."""
NARROW_COMPILER = f"{STRICT_COMPILER} -mno-avx512f"
"""For an x86-64 processor without AVX-512."""


def choose_compiler():
    """The strict one, unless CXX names another: all tests share one library, compiled once."""
    os.environ.setdefault("CXX", STRICT_COMPILER)


def use_backend(name, monkeypatch):
    """Let this test run by one of BACKENDS alone; returns its name."""
    if name == "torch":
        modules = [part for part in vars(native).values() if isinstance(part, ModuleType)]
        for module in modules:
            for question in ("serves", "serves_bfloat16"):
                if hasattr(module, question):
                    monkeypatch.setattr(module, question, lambda *_: False)
        assert not native.norm.serves(torch.ones(1, 1), None, torch.float32)
    else:
        require(library() is not None)
    return name


def require_compiler():
    """Skip on a laptop without a C++ compiler; fail in CI."""
    require(shutil.which("c++") is not None)


def require(there):
    if not there and os.environ.get("CI"):
        pytest.fail("no C++ compiler")
    if not there:
        pytest.skip("no C++ compiler")


if __name__ == "__main__":
    choose_compiler()
    library()
