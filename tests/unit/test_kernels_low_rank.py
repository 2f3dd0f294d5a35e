"""Products of low rank for groups of rows: exact, and no row depends on another one."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import LowRank, RowGroup, native, reference

OPS = {
    "native": native.low_rank.add_low_rank,
    "torch": reference.low_rank.add_low_rank,
}


@pytest.fixture(params=list(OPS))
def add(request):
    if request.param == "native" and native.build.library() is None:
        pytest.skip("no C++ compiler")
    return OPS[request.param]


def factors(rank, inputs, outputs, begin=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, inputs, generator=generator)
    up = torch.randn(outputs, rank, generator=generator)
    return down, up, LowRank.of(down, up, begin)


def case(rows, inputs, outputs, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, inputs, generator=generator),
        torch.randn(rows + 3, outputs, generator=generator),
        torch.randperm(rows + 3, generator=generator)[:rows],
    )


@pytest.mark.parametrize(
    ("rank", "inputs", "outputs"),
    [(1, 1, 1), (16, 48, 96), (5, 33, 77), (17, 50, 130), (70, 9, 16)],
)
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_each_group_has_its_own_products(add, rank, inputs, outputs, rows):
    x, y, places = case(rows, inputs, outputs + 5)
    first, second = factors(rank, inputs, outputs, 3), factors(rank + 2, inputs, outputs, 5, seed=1)
    also = factors(2, inputs, 3, seed=2)
    cut = rows // 2
    expected = y.double()
    for (down, up, product), part in (
        (first, slice(0, cut)),
        (also, slice(0, cut)),
        (second, slice(cut, rows)),
    ):
        added = x[part].double() @ down.t().double() @ up.t().double()
        expected[places[part], product.begin : product.begin + product.outputs] += added
    add(y, x, places, [RowGroup(0, cut, (first[2], also[2])), RowGroup(cut, rows, (second[2],))])
    largest = expected.abs().max()
    torch.testing.assert_close(y.double() / largest, expected / largest, rtol=0, atol=1e-6)


def test_no_bit_of_a_row_depends_on_the_others(add):
    x, y, places = case(23, 200, 150)
    product = factors(16, 200, 150)[2]
    whole = y.clone()
    add(whole, x, places, [RowGroup(0, 23, (product,))])
    for begin, end in ((0, 1), (5, 7), (9, 14), (3, 23)):
        part = y.clone()
        add(part, x[begin:end], places[begin:end], [RowGroup(0, end - begin, (product,))])
        assert torch.equal(part[places[begin:end]], whole[places[begin:end]])
    untouched = [row for row in range(26) if row not in places.tolist()]
    assert torch.equal(whole[untouched], y[untouched])


def test_in_fp64_the_sums_are_in_fp64():
    x, y, places = (one.double() if one.is_floating_point() else one for one in case(3, 40, 30))
    down, up, product = factors(4, 40, 30)
    expected = y.clone()
    expected[places] += x @ down.double().t() @ up.double().t()
    kernels.add_low_rank(y, x, places, [RowGroup(0, 3, (product,))])
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)


def test_operands_that_do_not_fit_are_refused():
    if native.build.library() is None:
        pytest.skip("no C++ compiler")
    x, y, places = case(3, 40, 30)
    product = factors(4, 40, 30)[2]
    for group, given in (
        (RowGroup(0, 4, (product,)), (y, x)),
        (RowGroup(0, 3, (product,)), (y[:, :20], x)),
        (RowGroup(0, 3, (product,)), (y, x[:, :39])),
    ):
        with pytest.raises(ValueError, match=r"rows|inputs"):
            native.low_rank.add_low_rank(*given, places, [group])


@pytest.mark.parametrize("precision", ["float", "int8", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (51, 75)])
def test_the_products_of_a_gated_weight_before_its_activation(precision, inputs, outputs):
    if precision == "bfloat16" and not kernels.serves_bfloat16("cpu"):
        pytest.skip("no instructions for bfloat16")
    generator = torch.Generator().manual_seed(3)
    parts = [
        (
            torch.randn(outputs, inputs, generator=generator),
            torch.randn(outputs, generator=generator),
        )
        for _ in range(2)
    ]
    x = torch.randn(5, inputs, generator=generator)
    gated = kernels.pack_gated(*parts, precision)
    found = gated.unactivated(x)
    expected = [kernels.pack_linear(*part, precision).linear(x, None, None) for part in parts]
    assert len(found) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    (alone,) = kernels.pack_linear(*parts[0], precision).unactivated(x)
    assert torch.equal(alone, expected[0])


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "silu"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (9, 1000)])
def test_activations_of_whole_rows_and_no_number_depends_on_its_place(kind, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 4
    found = kernels.activation(x, kind)
    torch.testing.assert_close(found, reference.activation.activation(x.double(), kind).float())
    for row in range(shape[0]):
        assert torch.equal(kernels.activation(x[row:, 1:].contiguous(), kind), found[row:, 1:])
