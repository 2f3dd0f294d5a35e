"""Models as wide as real ones, and prompts of several blocks and splits: more blocks of threads
than a GPU holds at once, more texts than one product of few rows takes."""

import numpy as np
import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.kernels import Norm, cuda, pack_linear
from nightjar.kernels.reference.fp8_linear import numbers, quantised
from tests.engines import random_ids
from tests.gpu.models import save
from tests.gpu.subject import Subject, assert_greedy, assert_log_probabilities
from tests.kernels_cuda.devices import assert_near, random
from tests.models import Gpt2Shape

SHAPES = {
    "cpu": Gpt2Shape(n_layer=1, n_embd=128, n_head=2, n_positions=1024),
    "cuda": Gpt2Shape(n_layer=2, n_embd=2048, n_head=16, n_positions=1024, vocab_size=51_200),
}
"""On the CPU a small one, which only shows that the test works."""

TEXTS, LONGEST = 20, 600


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", "bf16"), id="cpu-bf16"),
        *(
            pytest.param(("cuda", precision), id=f"cuda-{precision}", marks=pytest.mark.gpu)
            for precision in ("fp16", "bf16")
        ),
    ],
)
def subject(request, tmp_path_factory):
    path = save(tmp_path_factory.mktemp("wide") / "model", SHAPES[request.param[0]])
    return Subject(*request.param, ModelDirectory.open(path))


def prompts():
    """Of 1 to LONGEST tokens."""
    rng = np.random.default_rng(0)
    return [random_ids(rng, int(n)) for n in np.linspace(1, LONGEST, TEXTS)]


def test_log_probabilities(subject):
    assert_log_probabilities(subject, prompts(), 4)


def test_texts_in_windows(subject):
    """A window of 32 places, and one of 8."""
    assert_greedy(subject, prompts(), 10, window_steps=4)
    assert_greedy(subject, prompts()[-3:], 10, window_steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_products_with_more_tiles_than_a_gpu_holds_blocks(dtype, rows):
    """A block goes on to its second tile and its third: with the norm before it, and added to a
    stream."""
    inputs, channels = 2048, 16_384
    weight = random((channels, inputs), dtype, seed=1, scale=inputs**-0.5)
    bias, stream = random(channels, dtype, seed=2), random((rows, inputs), seed=3)
    onto = random((rows, channels), seed=4)
    norm = Norm(random(inputs, seed=5) + 1, random(inputs, seed=6), 1e-5)
    there = Norm(norm.weight.cuda(), norm.bias.cuda(), norm.epsilon)
    given = weight.cuda(), bias.cuda()
    normed = torch.nn.functional.layer_norm(
        stream.double(), (inputs,), norm.weight.double(), norm.bias.double(), norm.epsilon
    ).to(dtype)
    wanted = normed.double() @ weight.double().T + bias.double()
    # A normalised number may be rounded to either side.
    slack = 8 * torch.finfo(dtype).eps
    got = cuda.linear.normed_linear(stream.cuda(), there, given)
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=slack, atol=slack)
    residual = onto.cuda()
    cuda.linear.linear_onto(residual, normed.cuda(), given)
    assert_near(residual, onto.double() + wanted, absolute=1e-4)


@pytest.mark.parametrize(
    ("device", "inputs", "channels"),
    [("cpu", 128, 48), pytest.param("cuda", 4096, 8192, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_products_in_fp8(device, inputs, channels, rows):
    """By the kernel of few rows, and by the tensor cores of FP8, which lose digits of a sum."""
    dtype = torch.bfloat16
    weight = random((channels, inputs), dtype, seed=1, scale=inputs**-0.5)
    bias, x = random(channels, dtype, seed=2), random((rows, inputs), dtype, seed=3)
    exact = [
        numbers(codes).double() * s.double()[:, None] for codes, s in map(quantised, (x, weight))
    ]
    wanted = exact[0] @ exact[1].T + bias.double()
    packed = pack_linear(weight.to(device), bias.to(device), "fp8")
    got = packed.linear(x.to(device), None, torch.float32)
    slack = 1e-5 if rows <= 8 else 2**-10 * float(wanted.abs().max())
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-5, atol=slack)
    rounded = packed.linear(x.to(device), None, None)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded.double().cpu(), wanted, rtol=2**-7, atol=slack)
