"""What the host needs of the machine it runs on."""

import os
import platform
import shutil

import pytest

_TOOLS = ("g++", "addr2line", "readelf")


def missing_tools() -> str | None:
    """Why kernels cannot run on this machine's CPU, or None when they can."""
    if platform.machine() != "x86_64":
        return f"the CUDA host runs on x86-64, this is {platform.machine()}"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"the CUDA host needs {', '.join(absent)} (apt-get install g++)" if absent else None


def require_tools() -> None:
    """Skip the test where kernels cannot run; in CI, fail it."""
    missing = missing_tools()
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
