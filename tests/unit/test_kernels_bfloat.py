"""bfloat16 products in panels against float64 of the rounded numbers, at sizes around those of
tiles, panels, segments and pairs."""

import pytest
import torch
from torch.nn import functional as F

from nightjar import kernels
from nightjar.kernels import native
from tests.unit.test_kernels_float import PANEL, SEGMENT, TILE, case, error_in_roundings

pytestmark = pytest.mark.skipif(
    not native.float_linear.serves_bfloat16(),
    reason="this processor has no instructions for bfloat16 that the kernels use",
)

EXACT = {
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
}


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pack(weight, bias):
    return kernels.pack_linear(weight, bias, "bfloat16")


def rounded(x):
    return x.bfloat16().float()


@pytest.mark.parametrize("rows", [1, 2, TILE - 1, TILE, TILE + 1, 3 * TILE - 5, 200, 1100])
@pytest.mark.parametrize("features", [1, 2, 3, SEGMENT - 1, SEGMENT, SEGMENT + 1, 768])
@pytest.mark.parametrize("outputs", [1, PANEL // 2, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL + 17])
def test_equals_the_product_of_the_rounded_numbers(rows, features, outputs):
    x, weight, bias = case(rows, features, outputs)
    found = kernels.linear(x, pack(weight, bias))
    assert found.dtype == torch.float32
    assert found.shape == (rows, outputs)
    # A sum of n terms is off by n roundings at the most, and by far fewer.
    error = error_in_roundings(found, rounded(x), rounded(weight), bias)
    assert error <= min(features + 2, 64)


@pytest.mark.parametrize("activation", [None, *EXACT])
@pytest.mark.parametrize(("features", "outputs"), [(30, 77), (64, 1535), (768, 256)])
@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_company(activation, features, outputs):
    x, weight, bias = case(300, features, outputs)
    packed = pack(weight, bias)
    whole = kernels.linear(x, packed, activation)
    for rows in (*range(1, 3 * TILE), 127, 128, 129, 200):
        start = rows % 17
        found = kernels.linear(x[start : start + rows], packed, activation)
        assert torch.equal(found, whole[start : start + rows]), rows


@pytest.mark.parametrize("kind", EXACT)
def test_runs_through_the_activation(kind):
    x, weight, bias = case(9, 50, 37)
    packed = pack(weight, bias)
    expected = EXACT[kind](kernels.linear(x, packed).double())
    found = kernels.linear(x, packed, kind).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("outputs", [5, PANEL, 2 * PANEL + 3])
@pytest.mark.parametrize("biased", [True, False])
def test_a_gated_pair_equals_its_two_products(outputs, biased):
    x, gate, bias = case(29, 51, outputs)
    _, up, _ = case(29, 51, outputs, seed=1)
    parts = [(gate, bias if biased else None), (up, bias * 2 if biased else None)]
    packed = [pack(*part) for part in parts]
    expected = kernels.linear(x, packed[0], "silu") * kernels.linear(x, packed[1])
    whole = kernels.pack_gated(*parts, "bfloat16")
    assert torch.equal(kernels.gated_linear(x, whole, "silu"), expected)


def test_weights_and_rows_of_other_layouts():
    x, weight, bias = case(5, 51, 60)
    packed = pack(weight, bias)
    expected = kernels.linear(x, packed)
    assert torch.equal(kernels.linear(x, pack(weight.t().contiguous().t(), bias)), expected)
    assert torch.equal(kernels.linear(torch.cat((x, x), 1)[:, :51], packed), expected)
    assert torch.equal(kernels.linear(torch.stack((x, x), -1)[..., 0], packed), expected)
    halves = x.half()
    assert torch.equal(kernels.linear(halves, packed), kernels.linear(halves.float(), packed))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_a_row_that_is_not_finite_stays_so_and_its_neighbours_do_not_feel_it(bad):
    """The largest floats are rounded to infinity."""
    x, weight, bias = case(8, 40, 20)
    packed = pack(weight, bias)
    clean = kernels.linear(x, packed)
    x[3, 7] = bad
    found = kernels.linear(x, packed)
    assert not found[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[kept], clean[kept])


def test_weights_of_bfloat16_take_half_the_memory_of_floats():
    _, weight, bias = case(1, 768, 96)
    halves, whole = pack(weight, bias).panels, kernels.pack_linear(weight, bias).panels
    assert 2 * halves.nbytes == whole.nbytes


@pytest.mark.parametrize("features", [8, 51])
def test_rows_of_a_table_are_those_of_the_weight(features):
    _, weight, _ = case(1, features, 60)
    packed = pack(weight, None)
    found = native.float_linear.rows(packed, torch.tensor([59, 60, 0, 1000, 47, 48]))
    assert torch.equal(found[[0, 2, 4, 5]], rounded(weight)[[59, 0, 47, 48]])
    assert not found[[1, 3]].any()
