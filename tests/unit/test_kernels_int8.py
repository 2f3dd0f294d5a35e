"""int8 products against float64 arithmetic on the same quantised numbers, and against the
unquantised product."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import native
from nightjar.kernels.reference.activation import KINDS
from nightjar.kernels.reference.int8_linear import (
    MAX_INPUTS,
    TILE_ROWS,
    activation_limit,
    quantize_rows,
)
from tests.backends import BACKENDS, use_backend


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    if request.param == "native" and not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")
    return use_backend(request.param, monkeypatch)


@pytest.fixture
def limit(backend):
    """Largest absolute value of a quantised activation."""
    return activation_limit() if backend == "torch" else 127


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def quantized(x, limit):
    """x [T, K] in float64 steps, and the step's size for each row, by the plain formula."""
    steps = x.double().abs().amax(-1, keepdim=True) / limit
    return (x.double() / steps).round(), steps


def case(rows, features, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    # Rows and channels of very different size, as they are in a model.
    x *= 10 ** torch.linspace(-3, 3, rows).unsqueeze(1)
    weight = torch.randn(outputs, features, generator=generator)
    weight *= 10 ** torch.linspace(-2, 1, outputs).unsqueeze(1)
    return x, weight, torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 4, 19, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS - 5, 1100])
@pytest.mark.parametrize(("features", "outputs"), [(33, 17), (768, 111), (3072, 64)])
def test_equals_exact_arithmetic_on_the_quantised_numbers(rows, features, outputs, limit):
    x, weight, bias = case(rows, features, outputs)
    found = kernels.linear(x, kernels.pack_linear(weight, bias, "int8"))
    values, scales = quantize_rows(x, limit)
    values = values.double() - limit - 1
    steps, channel_scales = quantized(weight, 127)
    product = (values @ steps.T) * scales.double() * channel_scales.T
    size = (values.abs() @ steps.abs().T) * scales.double() * channel_scales.T + bias.abs()
    assert found.dtype == torch.float32
    # One rounding for each of: sum to FP32, channel scale, row scale, bias; and of the scales.
    assert ((found.double() - product - bias).abs() <= 8 * 2.0**-24 * size).all()


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_error_against_the_unquantised_product_is_bounded(rows, limit):
    x, weight, bias = case(rows, 500, 90)
    found = kernels.linear(x, kernels.pack_linear(weight, bias, "int8")).double()
    x, weight = x.double(), weight.double()
    # Each factor is off by half a step at most: |xw - x'w'| <= |x| dw + |w'| dx.
    dx = x.abs().amax(-1, keepdim=True) / limit / 2
    dw = weight.abs().amax(-1, keepdim=True) / 127 / 2
    bound = x.abs().sum(-1, keepdim=True) * dw.T + dx * (weight.abs() + dw).sum(-1)
    error = (found - x @ weight.T - bias).abs()
    assert (error <= bound * 1.0001 + 1e-6).all()
    # And in the mean, errors of random sign being smaller than their bound: better than 2 %.
    assert error.pow(2).mean().sqrt() < 0.02 * (x @ weight.T).pow(2).mean().sqrt()


@pytest.mark.sampled
@pytest.mark.parametrize("activation", [None, *KINDS])
@pytest.mark.parametrize(("features", "outputs"), [(30, 77), (64, 1535), (768, 256)])
@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_company(activation, features, outputs):
    x, weight, bias = case(300, features, outputs)
    packed = kernels.pack_linear(weight, bias, "int8")
    x = x[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    whole = kernels.linear(x, packed, activation)
    for rows in (*range(1, 71), 127, 128, 129, 200):
        start = rows % 17
        found = kernels.linear(x[start : start + rows], packed, activation)
        assert torch.equal(found, whole[start : start + rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_runs_through_the_activation(kind):
    x, weight, bias = case(9, 50, 37)
    packed = kernels.pack_linear(weight, bias, "int8")
    expected = {
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[kind](kernels.linear(x, packed).double())
    found = kernels.linear(x, packed, kind).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("features", "outputs"), [(50, 37), (64, 16), (768, 100)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_gated_pair_equals_its_two_products(features, outputs, biased):
    x, gate, bias = case(29, features, outputs)
    _, up, _ = case(29, features, outputs, seed=1)
    parts = [(gate, bias if biased else None), (up, bias * 2 if biased else None)]
    packed = [kernels.pack_linear(*part, "int8") for part in parts]
    expected = kernels.linear(x, packed[0], "silu") * kernels.linear(x, packed[1])
    found = kernels.linear(x, kernels.pack_gated(*parts, "int8"), "silu")
    assert torch.equal(found, expected)
    whole = kernels.pack_gated(*parts, "int8")
    for rows in (1, 5, 12, 13, 28):
        assert torch.equal(kernels.linear(x[:rows], whole, "silu"), found[:rows])


@pytest.mark.parametrize("biased", [True, False])
def test_a_weight_is_packed_in_pieces_as_it_is_at_once(biased, monkeypatch):
    x, gate, bias = case(5, 50, 300)
    _, up, _ = case(5, 50, 300, seed=1)
    parts = [(gate, bias if biased else None), (up, None)]
    at_once = kernels.pack_linear(*parts[0], "int8"), kernels.pack_gated(*parts, "int8")
    monkeypatch.setattr(native.int8_linear, "CHANNELS_AT_ONCE", 64)
    pieces = kernels.pack_linear(*parts[0], "int8"), kernels.pack_gated(*parts, "int8")
    assert torch.equal(kernels.linear(x, pieces[0]), kernels.linear(x, at_once[0]))
    gated = [kernels.linear(x, pair[1], "silu") for pair in (pieces, at_once)]
    assert torch.equal(*gated)


def test_a_row_of_zeros_gives_the_bias_and_so_does_a_channel_of_zeros():
    x, weight, bias = case(6, 40, 20)
    x[2] = 0.0
    weight[5] = 0.0
    found = kernels.linear(x, kernels.pack_linear(weight, bias, "int8"))
    assert torch.equal(found[2], bias)
    assert torch.equal(found[:, 5], bias[5].expand(6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_and_its_neighbours_do_not_feel_it(bad):
    x, weight, bias = case(8, 40, 20)
    packed = kernels.pack_linear(weight, bias, "int8")
    clean = kernels.linear(x, packed)
    x[3, 7] = bad
    found = kernels.linear(x, packed)
    assert not found[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[kept], clean[kept])


def test_bias_and_weights_of_other_dtypes_and_layouts():
    x, weight, bias = case(5, 48, 24)
    half = kernels.pack_linear(weight.bfloat16(), bias.bfloat16(), "int8")
    same = kernels.pack_linear(weight.bfloat16().float(), bias.bfloat16().float(), "int8")
    assert torch.equal(kernels.linear(x, half), kernels.linear(x, same))
    turned = kernels.pack_linear(weight.t().contiguous().t(), None, "int8")
    assert torch.equal(
        kernels.linear(x, turned) + bias,
        kernels.linear(x, kernels.pack_linear(weight, bias, "int8")),
    )
    strided = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(kernels.linear(strided, half), kernels.linear(x, half))


def test_int8_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="need torch with oneDNN on a CPU, not meta: use bf16"):
        kernels.pack_linear(torch.empty(4, 4, device="meta"), None, "int8")


def test_sums_that_could_overflow_are_refused():
    weight = torch.ones(1, MAX_INPUTS + 1)
    with pytest.raises(ValueError, match=f"of {MAX_INPUTS + 1} inputs: at most {MAX_INPUTS}"):
        kernels.pack_linear(weight, None, "int8")
    packed = kernels.pack_linear(weight[:, 1:].contiguous(), None, "int8")
    found = kernels.linear(torch.ones(1, MAX_INPUTS), packed)
    torch.testing.assert_close(found, torch.full((1, 1), float(MAX_INPUTS)), rtol=1e-5, atol=0)
