import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.models import GPU_FAMILY, GPU_TINY
from tests.engines import run
from tests.families import save_family
from tests.kernels_cuda.conftest import device, host  # noqa: F401
from tests.models import save_gpt2


@pytest.fixture(scope="session")
def gpt(tmp_path_factory):
    """GPT-2 of one layer with heads of 64 channels."""
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("gpu") / "gpt", GPU_TINY))


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Grouped heads, norms of heads, rotations, a gate."""
    path = tmp_path_factory.mktemp("gpu") / "family"
    path.mkdir()
    return ModelDirectory.open(save_family(path, GPU_FAMILY))


@pytest.fixture
def by_cpu(gpt, texts):
    """The results of requests as the engine computes them on a CPU, in FP32."""

    def results(requests, vectors=None):
        with launch.using(None):
            return run(load_model(gpt, "fp32"), texts, requests, vectors)

    return results


@pytest.fixture
def on_device(device, gpt):  # noqa: F811
    """The GPT on the kernels under test, in FP32."""
    return load_model(gpt, "fp32", device)


@pytest.fixture(scope="session")
def texts(gpt):
    """The bytes of the GPT's tokens."""
    return gpt.tokenizer().token_bytes
