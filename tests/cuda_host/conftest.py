"""Every test here runs kernels."""

import pytest

from tests.cuda_host import require_tools


@pytest.fixture(scope="session", autouse=True)
def _compiler():
    require_tools()
