"""FP32 and bfloat16 products in panels against float64, at sizes around those of tiles, panels,
segments and pairs."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import native
from nightjar.kernels.native.build import library
from nightjar.kernels.reference.activation import KINDS
from tests.backends import BACKENDS, require, use_backend
from tests.float_products import case

TILE, PANEL, SEGMENT = 8, 48, 16


def pytest_generate_tests(metafunc):
    """By every backend, and in bfloat16, too, by the compiled kernels where they have that."""
    cases = [(backend, "float") for backend in BACKENDS]
    if native.float_linear.serves_bfloat16():
        cases.append(("native", "bfloat16"))
    metafunc.parametrize(("backend", "precision"), cases, indirect=True)


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    use_backend(request.param, monkeypatch)
    if request.param == "native":
        require(native.float_linear.serves(torch.ones(1, 1)))
    return request.param


@pytest.fixture(autouse=True)
def precision(request):
    """Of weights."""
    return request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error_in_roundings(found, x, weight, bias):
    """How far each number is from the exact one, in roundings of a sum of its terms' sizes."""
    x, weight = x.double(), weight.double()
    size = x.abs() @ weight.abs().T + bias.abs()
    return ((found.double() - x @ weight.T - bias).abs() / (size * 2.0**-24)).max()


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE - 5, 200, 1100])
@pytest.mark.parametrize("features", [1, 2, 3, SEGMENT - 1, SEGMENT, SEGMENT + 1, 768])
@pytest.mark.parametrize("outputs", [1, PANEL // 2, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL + 17])
def test_equals_the_product_in_float64(precision, rows, features, outputs):
    x, weight, bias = case(rows, features, outputs)
    found = kernels.linear(x, kernels.pack_linear(weight, bias, precision))
    assert found.dtype == torch.float32
    assert found.shape == (rows, outputs)
    # A sum of n terms is off by n roundings at the most, and by far fewer.
    if precision == "bfloat16":  # of the rounded numbers
        x, weight = (part.bfloat16().float() for part in (x, weight))
    assert error_in_roundings(found, x, weight, bias) <= min(features + 2, 64)


@pytest.mark.sampled
@pytest.mark.parametrize("activation", [None, *KINDS])
@pytest.mark.parametrize(("features", "outputs"), [(30, 77), (64, 1535), (768, 256)])
@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_company(precision, activation, features, outputs):
    x, weight, bias = case(300, features, outputs)
    packed = kernels.pack_linear(weight, bias, precision)
    whole = kernels.linear(x, packed, activation)
    for rows in (*range(1, 3 * TILE), 127, 128, 129, 200):
        start = rows % 17
        found = kernels.linear(x[start : start + rows], packed, activation)
        assert torch.equal(found, whole[start : start + rows]), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [1, 30])
def test_runs_through_the_activation(precision, kind, spread):
    x, weight, bias = case(9, 50, 37)
    packed = kernels.pack_linear(weight * spread, bias, precision)
    expected = {
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }[kind](kernels.linear(x, packed).double())
    found = kernels.linear(x, packed, kind).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("outputs", [5, PANEL, 2 * PANEL + 3])
@pytest.mark.parametrize("biased", [True, False])
def test_a_gated_pair_equals_its_two_products(precision, outputs, biased):
    x, gate, bias = case(29, 50, outputs)
    _, up, _ = case(29, 50, outputs, seed=1)
    parts = [(gate, bias if biased else None), (up, bias * 2 if biased else None)]
    packed = [kernels.pack_linear(*part, precision) for part in parts]
    expected = kernels.linear(x, packed[0], "silu") * kernels.linear(x, packed[1])
    whole = kernels.pack_gated(*parts, precision)
    found = kernels.linear(x, whole, "silu")
    assert torch.equal(found, expected)
    for rows in (1, 5, 12, 13, 28):
        assert torch.equal(kernels.linear(x[:rows], whole, "silu"), found[:rows])


def test_weights_and_rows_of_other_layouts(precision):
    x, weight, bias = case(5, 50, 60)
    expected = kernels.linear(x, kernels.pack_linear(weight, bias, precision))
    turned = kernels.pack_linear(weight.t().contiguous().t(), bias, precision)
    assert torch.equal(kernels.linear(x, turned), expected)
    packed = kernels.pack_linear(weight, bias, precision)
    wide, strided = torch.cat((x, x), 1), torch.stack((x, x), -1)[..., 0]
    assert torch.equal(kernels.linear(wide[:, :50], packed), expected)
    assert torch.equal(kernels.linear(strided, packed), expected)


def test_no_rows_are_no_results(precision):
    _, weight, bias = case(1, 50, 60)
    packed = kernels.pack_linear(weight, bias, precision)
    assert kernels.linear(torch.empty(0, 50), packed).shape == (0, 60)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_its_neighbours_do_not_feel_it(precision, bad):
    x, weight, bias = case(8, 40, 20)
    packed = kernels.pack_linear(weight, bias, precision)
    clean = kernels.linear(x, packed)
    x[3, 7] = bad
    found = kernels.linear(x, packed)
    assert not found[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[kept], clean[kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_torchs(dtype):
    assert library() is not None
    assert not native.float_linear.serves(torch.ones(1, 1, dtype=dtype))
    x, weight, bias = (part.to(dtype) for part in case(7, 50, 60))
    found = kernels.linear(x, kernels.pack_linear(weight, bias))
    assert found.dtype == dtype
    torch.testing.assert_close(found, x @ weight.T + bias, atol=5e-2, rtol=2e-2)
