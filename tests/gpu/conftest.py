import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from tests.gpu.models import LLAMA, save
from tests.gpu.sanitizer import require


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A small model with shared key heads, of a head size that the kernels have."""
    return ModelDirectory.open(save(tmp_path_factory.mktemp("gpu") / "llama", LLAMA))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine_device(request):
    """Where an engine computes.  What a test says of it holds on both."""
    yield request.param
    if request.param == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def llama_model(llama, engine_device):
    """The small model there: in FP16 on a GPU, which nothing has it in on the CPU."""
    return load_model(llama, "fp16" if engine_device == "cuda" else "fp32", engine_device)


@pytest.fixture(scope="session")
def compute_sanitizer():
    """The program's path."""
    return require()
