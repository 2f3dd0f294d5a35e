import pytest
import torch
from torch.nn import functional as F

from nightjar.kernels import cuda, reference
from nightjar.kernels.cuda.activation import KINDS
from tests.kernels_cuda.activations import EXACT
from tests.kernels_cuda.devices import assert_near, random, storages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("columns", [64, 111])
def test_every_kind_with_bias(device, kind, storage, columns):
    dtype = storages[storage]
    x, bias = random((3, columns), dtype, scale=4.0), random(columns, dtype, seed=1)
    wanted = EXACT[kind](x.double() + bias.double())
    got = cuda.activation.activation(x.to(device), kind, bias.to(device))
    assert_near(got, wanted)


@pytest.mark.parametrize("columns", [520, 2056])
def test_a_gate_multiplies_halves_of_one_projection(device, columns):
    packed = random((3, 2 * columns), torch.float16).to(device)
    gate, up = packed.chunk(2, dim=1)
    got = cuda.activation.activation(gate, "silu", up=up)
    assert_near(got, F.silu(gate.cpu().double()) * up.cpu().double())


def test_the_reference_agrees(device):
    x = random((5, 200), torch.bfloat16, scale=3.0)
    for kind in KINDS:
        wanted = reference.activation.activation(x, kind)
        assert_near(cuda.activation.activation(x.to(device), kind), wanted, absolute=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_the_range(device, kind):
    """No NaN where the exponential overflows, and NaN stays NaN."""
    x = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, float("nan"), 0.0, 0.0]])
    got = cuda.activation.activation(x.to(device), kind).cpu()[0]
    assert got[:2].abs().max() < 1e-6
    assert got[2] == 0
    assert torch.equal(got[3:5], x[0, 3:5])
    assert got[5].isnan()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tanh"}, "unknown activation 'tanh'"),
        ({"x": torch.ones(2, 8).double()}, "x is float64"),
        ({"x": torch.ones(8, 2).T}, "side by side"),
        ({"bias": torch.ones(7)}, "bias has shape"),
        ({"up": torch.ones(2, 7)}, "up has shape"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cuda.activation.activation(**({"x": torch.ones(2, 8), "kind": "relu"} | arguments))
