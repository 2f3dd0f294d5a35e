"""Running a test by each backend of the CPU ops."""

import os
import shutil

import pytest

from nightjar.kernels import native
from nightjar.kernels.native.build import library

BACKENDS = ("torch", "native")


def use_backend(name, monkeypatch):
    """Let this test run by one of BACKENDS alone; returns its name."""
    if name == "torch":
        for module in (native.attention, native.int8_linear, native.log_prob, native.norm):
            monkeypatch.setattr(module, "serves", lambda *_: False)
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
