"""Products in FP8 through the engine on the CUDA kernels."""

import numpy as np
import pytest

from nightjar.gpu_worker.engine import RankRequest
from nightjar.gpu_worker.models import load_model
from nightjar.kernels.cuda import launch
from tests.engine_cuda.requests import engine_of, prompt, tokens
from tests.engines import assert_nothing_held, drain, generate, run


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
