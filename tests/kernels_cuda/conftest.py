import os
from pathlib import Path

import pytest
import torch

from nightjar.kernels.cuda import launch
from tests.combinations import mark_all_but_a_sample
from tests.cuda_host import missing_tools, schedule
from tests.kernels_cuda.devices import run_on_host, seed_of

WHOLE = ("test_kernel_budget.py", "test_planted_bugs.py")
"""Every case of these is another promise."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Leave most combinations on the CUDA host to `make test-all`; a GPU computes all."""
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    on_host = [
        one for one in ours if hasattr(one, "callspec") and not one.get_closest_marker("gpu")
    ]
    mark_all_but_a_sample(one for one in on_host if one.path.name not in WHOLE)


@pytest.fixture
def host():
    """g++ and what else the CUDA host needs."""
    missing = missing_tools()
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device that a test's tensors are to be on; kernels started in the test run there."""
    if request.param == "cuda":
        yield "cuda"
        torch.cuda.synchronize()
        return
    request.getfixturevalue("host")
    with launch.using(run_on_host), schedule(seed_of(request.node.nodeid)):
        yield "cpu"
