"""Products in FP8 through the engine on the CUDA kernels."""

import numpy as np
import pytest
import torch

from nightjar.gpu_worker.engine import RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.kernels import Norm, Place, normed_linear, pack_linear
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import engine_of, prompt, tokens
from tests.engines import assert_nothing_held, drain, generate, run
from tests.low_rank_products import Factors, adapter, rows_of


def scores(directory, dtype, device="cpu"):
    """The mean likelihoods of documents, in steps of few rows and of many."""
    lengths = (1, 1, 2, 3, 9, 30)
    asked = [
        RankRequest(i, prompt(3 + 20 * i, 9 + i), [prompt(n, n + 10 * i) for n in lengths])
        for i in range(2)
    ]
    found = run(load_model(directory, dtype, device), directory.tokenizer().token_bytes, asked)
    return np.concatenate([found[i].mean_nll for i in range(2)])


def rms(x):
    return float(np.sqrt(np.square(x).mean()))


@pytest.mark.parametrize("name", ["gpt", "family"])
def test_scores_are_near_those_that_a_cpu_emulates(device, name, request):
    """Layer norms and biases; a gate, norms of heads and rotations.

    bf16 rounds some numbers to another side, and some of these then get another code.
    """
    directory = request.getfixturevalue(name)
    with launch.using(None):
        exact, emulated = (scores(directory, dtype) for dtype in ("fp32", "fp8"))
    found = scores(directory, "fp8", device)
    assert 0 < rms(found - exact) < 1.5 * rms(emulated - exact)
    assert rms(found - emulated) < 1.2 * rms(emulated - exact)


@pytest.mark.parametrize("fp8_cache", [pytest.param(False, marks=pytest.mark.slow), True])
def test_windows_change_no_token(device, family, fp8_cache):
    """Steps that the host reads one by one, and several without it."""
    texts = family.tokenizer().token_bytes
    model = load_model(family, "fp8", device)
    asked = [generate(i, prompt(3 + 20 * i, i), max_tokens=5) for i in range(2)]
    found = []
    for steps in (1, 4):
        engine = engine_of(model, texts, fp8_cache=fp8_cache, window_steps=steps)
        found.append(tokens(drain(engine, *asked)))
        assert engine.windows is not None
        assert_nothing_held(engine)
    assert found[0] == found[1]


def test_a_product_that_adapters_add_to_is_computed_as_without_them(device):
    """Of few rows and of many: the same numbers, in FP32."""
    norm = Norm(torch.ones(64, device=device), None, 1e-5)
    weight = pack_linear(torch.randn(48, 64).bfloat16().to(device), None, "fp8")
    factors = Factors.made(Place.QUERY_KEY_VALUE, 4, 64, 48)
    for rows in (3, 12):
        stream = torch.randn(rows, 64).to(device)
        owners = [-1, *[0] * (rows - 1)]
        adapted = rows_of([adapter([factors])], owners).to(device)
        found = normed_linear(stream.clone(), None, norm, weight, torch.float32, adapted.added(0))
        plain = normed_linear(stream.clone(), None, norm, weight, torch.float32)
        assert torch.equal(found[0], plain[0])
        x = torch.nn.functional.rms_norm(stream.cpu(), (64,), eps=1e-5)
        wanted = plain.cpu().double() + factors.added(x, 48)
        torch.testing.assert_close(found[1:].cpu().double(), wanted[1:], rtol=1e-4, atol=1e-4)
