"""Running a test by each backend of the CPU ops."""

import os

import pytest

from nightjar.kernels import native
from nightjar.kernels.native.build import library

BACKENDS = ("torch", "native")


def use_backend(name, monkeypatch):
    """Let this test run by one of BACKENDS alone; returns its name."""
    if name == "torch":
        for module in (native.attention, native.int8_linear, native.log_prob, native.norm):
            monkeypatch.setattr(module, "serves", lambda *_: False)
    elif library() is None:
        if os.environ.get("CI"):
            pytest.fail("the compiled kernels are not there")
        pytest.skip("no C++ compiler")
    return name
