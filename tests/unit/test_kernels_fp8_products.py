"""Products of weights in FP8 on a CPU, against float64 of the same rounded numbers."""

import pytest
import torch
from torch.nn import functional as F

from nightjar import kernels
from nightjar.kernels.reference.fp8_linear import quantised
from tests import fp8
from tests.backends import BACKENDS, use_backend


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def case(rows, features, outputs):
    """Rows and channels of very different size, as they are in a model."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, features, generator=generator)
    x *= 10 ** torch.linspace(-3, 3, rows).unsqueeze(1)
    weight = torch.randn(outputs, features, generator=generator)
    weight *= 10 ** torch.linspace(-2, 1, outputs).unsqueeze(1)
    return x.bfloat16(), weight.bfloat16(), torch.randn(outputs, generator=generator).bfloat16()


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
@pytest.mark.parametrize(("features", "outputs"), [(33, 17), (96, 64)])
def test_equals_exact_arithmetic_on_the_rounded_numbers(rows, features, outputs):
    x, weight, bias = case(rows, features, outputs)
    exact = fp8.product_numbers(x) @ fp8.product_numbers(weight).T + bias.double()
    packed = kernels.pack_linear(weight, bias, "fp8")
    assert packed.rows_dtype == torch.bfloat16
    whole = kernels.linear(x, packed, out_dtype=torch.float32)
    largest = exact.abs().amax(-1, keepdim=True)
    assert float(((whole.double() - exact).abs() / largest).max()) < 1e-6
    found = kernels.linear(x, packed)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, whole.bfloat16())
    activated = kernels.linear(x, packed, "gelu_tanh", torch.float32)
    torch.testing.assert_close(activated, F.gelu(whole, approximate="tanh"), rtol=1e-5, atol=1e-6)


def test_no_rows_bits_depend_on_the_other_rows():
    x, weight, bias = case(40, 96, 64)
    packed = kernels.pack_linear(weight, bias, "fp8")
    whole = kernels.linear(x, packed)
    for part in (slice(0, 1), slice(7, 12), slice(3, 40)):
        assert torch.equal(kernels.linear(x[part], packed), whole[part])
    x[5, 3] = float("nan")
    beside = kernels.linear(x, packed)
    assert beside[5].isnan().all()
    others = torch.arange(40) != 5
    assert torch.equal(beside[others], whole[others])


def test_a_gate_is_rounded_with_scales_of_its_own():
    x, weight, bias = case(5, 48, 32)
    gate = (weight.flip(0) * 3).contiguous()
    packed = kernels.pack_gated((gate, bias), (weight, None), "fp8")
    exact = fp8.product_numbers(x)
    gated = F.silu(exact @ fp8.product_numbers(gate).T + bias.double())
    exact = gated * (exact @ fp8.product_numbers(weight).T)
    found = kernels.linear(x, packed, "silu").double()
    largest = exact.abs().amax(-1, keepdim=True)
    assert float(((found - exact).abs() / largest).max()) < 3 * 2.0**-8


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_channel_that_is_not_finite_is_nan_alone(wrong):
    x, weight, _ = case(4, 48, 32)
    weight[3, 7] = wrong
    assert quantised(weight)[1].isnan().nonzero().flatten().tolist() == [3]
    found = kernels.linear(x, kernels.pack_linear(weight, None, "fp8"))
    assert found.isnan().any(0).nonzero().flatten().tolist() == [3]


def test_no_rows_and_more_rows_than_are_rounded_at_once():
    _, weight, _ = case(1, 48, 2100)
    codes, scales = quantised(weight)
    parts = [quantised(part) for part in weight.split(700)]
    assert torch.equal(codes, torch.cat([part[0] for part in parts]))
    assert torch.equal(scales, torch.cat([part[1] for part in parts]))
    packed = kernels.pack_linear(weight, None, "fp8")
    assert kernels.linear(torch.zeros(0, 48).bfloat16(), packed).shape == (0, 2100)
