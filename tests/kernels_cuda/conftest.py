import os

import pytest
import torch

from nightjar.kernels.cuda import launch
from tests.cuda_host import missing_tools, schedule
from tests.kernels_cuda.devices import run_on_host, seed_of


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
