"""A model split over ranks, each on the CUDA kernels, which run on the CPU here."""

import threading

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.kernels.cuda import launch
from tests.cuda_host import schedule
from tests.engine_cuda.models import GPU_FAMILY, GPU_TINY
from tests.engine_cuda.requests import CACHE, prompt
from tests.engines import generate
from tests.families import save_family
from tests.kernels_cuda.conftest import host  # noqa: F401
from tests.kernels_cuda.devices import run_on_host
from tests.models import save_gpt2
from tests.shards import answers, assert_same, thread_ranks


@pytest.fixture
def started(host):  # noqa: F811
    """Kernels run on the CPU, in threads that a test starts, too; which were started."""
    found = set()

    def run(kernel, *given):
        found.add((threading.get_ident(), kernel.source))
        run_on_host(kernel, *given)

    with launch.using(run), schedule(5):
        yield found


@pytest.fixture(scope="module", params=["gpt", "family"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("split") / "model"
    if request.param == "gpt":
        return ModelDirectory.open(save_gpt2(path, GPU_TINY))
    path.mkdir()
    return ModelDirectory.open(save_family(path, GPU_FAMILY))


def requests():
    """Texts of several lengths, drawn ones, with log-probabilities and prompt vectors; rankings."""
    return [
        generate(1, prompt(40, 1), max_tokens=4, logprobs=2),
        generate(2, prompt(3, 2), max_tokens=6),
        generate(3, prompt(9, 3), max_tokens=4, n=2, temperature=1.0, seed=5),
        generate(4, [320, 321, 5], max_tokens=3, vectors="v"),
        RankRequest(5, prompt(20, 4), [prompt(n, n) for n in (1, 4, 9)]),
    ]


def test_it_answers_as_the_whole_model_does(started, directory):
    """Heads, widened channels and vocabulary split in two; the family's one key head on both."""
    token_bytes = directory.tokenizer().token_bytes
    wanted = answers(load_model(directory, "fp32"), token_bytes, requests(), **CACHE)
    started.clear()
    with thread_ranks(directory, 2) as rank_zero:
        found = answers(rank_zero.load("fp32"), token_bytes, requests(), **CACHE)
    assert_same(found, wanted, 2e-5)
    of_ranks = {}
    for rank, source in started:
        of_ranks.setdefault(rank, set()).add(source)
    assert len(of_ranks) == 2
    for sources in of_ranks.values():
        assert sources >= {"embedding", "norm", "qkv_post", "decode_attention", "activation"}


def test_in_16_bits_it_is_as_near(started, directory):
    """Few rows: the kernel of products, and sums over the ranks in 16 bits."""
    token_bytes = directory.tokenizer().token_bytes
    asked = [RankRequest(1, prompt(5), [prompt(3, seed) for seed in range(2)])]
    (wanted,) = answers(load_model(directory, "fp32"), token_bytes, asked, **CACHE).values()
    started.clear()
    with thread_ranks(directory, 2) as rank_zero:
        (found,) = answers(rank_zero.load("fp16"), token_bytes, asked, **CACHE).values()
    assert found.mean_nll == pytest.approx(wanted.mean_nll, rel=0.01)
    assert len({rank for rank, source in started if source == "linear"}) == 2
