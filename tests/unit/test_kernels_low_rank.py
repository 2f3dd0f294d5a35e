"""Products of low rank in the products of a block: exact, and no row depends on another one."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import AdapterProducts, Added, Place, native, reference
from nightjar.kernels.low_rank import RowGroup
from tests.backends import BACKENDS, use_backend
from tests.cpu_blocks import a_norm, normal, pack, pack_up
from tests.low_rank_products import Factors, adapter, mixed, rows_of

PRECISIONS = {"torch": ["float", "int8", "fp8"], "native": ["float", "bfloat16", "int8"]}
SHAPES = [(1, 16, 48, 96), (9, 5, 33, 77), (40, 17, 50, 130), (1100, 70, 24, 40)]
"""Rows, rank, inputs, outputs."""


def pytest_generate_tests(metafunc):
    """Every test by every backend, in each of its precisions."""
    if "precision" not in metafunc.fixturenames:
        return
    cases = [(backend, precision) for backend in BACKENDS for precision in PRECISIONS[backend]]
    if not native.float_linear.serves_bfloat16():
        cases.remove(("native", "bfloat16"))
    metafunc.parametrize(("backend", "precision"), cases, indirect=["backend"])


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    chosen = getattr(request, "param", None)
    if chosen == "native" and not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")
    return None if chosen is None else use_backend(chosen, monkeypatch)


def of_three(place, rank, inputs, outputs):
    """Factors of three adapters; the second has two products, one of which begins late."""
    begin, last = outputs // 3, outputs - outputs // 3
    return [
        [Factors.made(place, rank, inputs, outputs)],
        [
            Factors.made(place, rank + 2, inputs, last, begin=begin, seed=1),
            Factors.made(place, 2, inputs, min(3, outputs), seed=2),
        ],
        [],
    ]


def expected(every, owners, x, outputs):
    """What the factors add to each row: float64[T, outputs]."""
    y = x.new_zeros(x.shape[0], outputs, dtype=torch.float64)
    for row, owner in enumerate(owners):
        for factors in every[owner] if owner >= 0 else ():
            y[row] += factors.added(x[row : row + 1], outputs)[0]
    return y


def assert_near(found, wanted, scale=1.0):
    largest = wanted.abs().max().clamp(min=1)
    torch.testing.assert_close(
        found.double() / largest, wanted / largest, rtol=0, atol=2e-6 * scale
    )


@pytest.mark.parametrize(("rows", "rank", "inputs", "outputs"), SHAPES)
def test_they_are_added_to_queries_keys_and_values(precision, rows, rank, inputs, outputs):
    every, owners = of_three(Place.QUERY_KEY_VALUE, rank, inputs, outputs), mixed(rows, 3)
    residual, norm = normal(rows, inputs), a_norm(inputs, True)
    weight = pack(outputs, inputs, precision)
    adapted = rows_of([adapter(one) for one in every], owners)
    plain = kernels.normed_linear(residual.clone(), None, norm, weight, torch.float32)
    found = kernels.normed_linear(
        residual.clone(), None, norm, weight, torch.float32, adapted.added(0)
    )
    x = kernels.normalize(residual, None, norm, torch.float32)
    assert_near(found, plain.double() + expected(every, owners, x, outputs))
    bare = [row for row, owner in enumerate(owners) if owner in (-1, 2)]
    assert torch.equal(found[bare], plain[bare])


@pytest.mark.parametrize(("rows", "rank", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_they_are_added_to_an_attention_s_output(precision, rows, rank, inputs, outputs, half):
    if half and precision == "float" and native.build.library() is None:
        pytest.skip("torch takes FP32 rows alone")
    every, owners = of_three(Place.ATTENTION_OUT, rank, inputs, outputs), mixed(rows, 3, seed=1)
    x, weight = normal(rows, inputs), pack(outputs, inputs, precision)
    if half and isinstance(weight, native.products.PanelWeight):
        x = x.half()
    adapted = rows_of([adapter(one) for one in every], owners)
    plain, more = kernels.linear(x, weight), expected(every, owners, x, outputs)
    assert_near(kernels.adapted_linear(x, weight, adapted.added(0)), plain.double() + more)
    stream = normal(rows, outputs, seed=9)
    wanted = stream.double() + plain.double() + more
    left = kernels.linear_onto(stream, x, weight, adapted.added(0))
    assert_near(stream if left is None else stream + left, wanted)


def in_float64(x, up, down, every, owners, kind):
    """A feed-forward block of `tests.cpu_blocks`' weights with factors, in float64."""
    inner, size = up
    seeds = (3, 5) if kind == "gated" else (3,)
    halves = []
    for gated, seed in enumerate(seeds):
        weight = normal(inner, size, seed=seed).double() / size**0.5
        half = x.double() @ weight.t() + normal(inner, seed=seed + 1).double()
        own = [[f for f in one if f.place is Place.UP and f.gated == bool(gated)] for one in every]
        halves.append(half + expected(own, owners, x, inner))
    middle = torch.nn.functional.silu(halves[0])
    middle = middle * halves[1] if kind == "gated" else middle
    weight = normal(size, inner, seed=7).double() / inner**0.5
    own = [[f for f in one if f.place is Place.DOWN] for one in every]
    more = expected(own, owners, middle, down)
    return middle @ weight.t() + normal(size, seed=8).double() + more


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize(("rows", "size", "inner"), [(1, 64, 96), (31, 50, 130), (1100, 24, 40)])
def test_they_are_added_before_and_after_an_activation(precision, kind, rows, size, inner):
    every = [
        [
            Factors.made(Place.UP, 4, size, inner),
            *([Factors.made(Place.UP, 3, size, inner, gated=True, seed=1)] * (kind == "gated")),
            Factors.made(Place.DOWN, 6, inner, size, seed=2),
        ],
        [Factors.made(Place.DOWN, 1, inner, size, seed=3)],
        [Factors.made(Place.UP, 20, size, inner, gated=kind == "gated", seed=4)],
        [],
    ]
    owners = mixed(rows, 4, seed=2)
    residual, norm = normal(rows, size), a_norm(size, False)
    up, down = pack_up(kind, inner, size, precision), pack(size, inner, precision, seed=7)
    block = norm, up, down, "silu", torch.float32
    adapted = rows_of([adapter(one) for one in every], owners)
    found = kernels.adapted_feed_forward(residual.clone(), *block, adapted.added(0))
    x = kernels.normalize(residual, None, norm, torch.float32)
    wanted = in_float64(x, (inner, size), size, every, owners, kind)
    if precision == "float":
        assert_near(found, wanted, scale=4)
    else:
        off = (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
        assert off < (0.06 if precision == "fp8" else 0.02)  # it keeps 4 bits of a number
    plain = kernels.feed_forward(residual.clone(), None, *block)
    bare = [row for row, owner in enumerate(owners) if owner in (-1, 3)]
    assert torch.equal(found[bare], plain[bare])
    stream = residual.clone()
    left = kernels.adapted_feed_forward_onto(stream, *block, adapted.added(0))
    assert torch.equal(stream if left is None else stream + left, residual + found)


def test_no_bit_of_a_row_depends_on_the_others(precision):
    size, inner, rows = 48, 80, 61
    every = [
        [
            Factors.made(Place.QUERY_KEY_VALUE, 8, size, 96, seed=seed),
            Factors.made(Place.UP, 4, size, inner, seed=seed),
            Factors.made(Place.DOWN, 4, inner, size, seed=seed),
        ]
        for seed in range(3)
    ]
    adapters, owners = [adapter(one) for one in every], mixed(rows, 3, seed=3)
    residual, norm = normal(rows, size), a_norm(size, True)
    qkv, up = pack(96, size, precision), pack(inner, size, precision)
    down = pack(size, inner, precision, seed=7)

    def both(chosen):
        added = rows_of(adapters, [owners[row] for row in chosen]).added(0)
        stream = residual[chosen].clone()
        first = kernels.normed_linear(stream, None, norm, qkv, torch.float16, added)
        block = norm, up, down, "gelu_tanh", torch.float32
        return torch.cat((first.float(), kernels.adapted_feed_forward(stream, *block, added)), 1)

    whole = both(list(range(rows)))
    for chosen in ([0], [7], [5, 6], list(range(9, 30)), list(range(rows))[::-1]):
        assert torch.equal(both(chosen), whole[chosen])


def test_in_fp64_the_sums_are_in_fp64():
    x, y = normal(3, 40).double(), normal(6, 31, seed=1).double()
    places, factors = torch.tensor([4, 0, 5]), Factors.made(Place.DOWN, 4, 40, 30, begin=1)
    wanted = y.clone()
    wanted[places] += factors.added(x, 31)
    (product,) = adapter([factors]).layers[0][Place.DOWN]
    reference.low_rank.add_low_rank(y, x, places, [RowGroup(0, 3, (product,))])
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)


def test_operands_that_do_not_fit_are_refused():
    if native.build.library() is None:
        pytest.skip("no C++ compiler")
    stream, norm, weight = normal(3, 40), a_norm(40, True), pack(32, 40, "float")

    def run(factors, owners, layer=0):
        added = rows_of([adapter(factors)], owners).added(layer)
        return kernels.normed_linear(stream, None, norm, weight, torch.float32, added)

    fits = Factors.made(Place.QUERY_KEY_VALUE, 4, 40, 32)
    assert run([fits], [0, -1, 0]).shape == (3, 32)
    for factors, owners, layer, message in (
        (Factors.made(Place.QUERY_KEY_VALUE, 4, 39, 32), [0, 0, 0], 0, "products of"),
        (Factors.made(Place.QUERY_KEY_VALUE, 4, 40, 33), [0, 0, 0], 0, "products of"),
        (fits, [0, 0], 0, "3 rows"),
        (fits, [0, 1, 0], 0, "rows of 1 adapters"),
        (fits, [0, 0, 0], 1, "layer 1 of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run([factors], owners, layer)


def test_an_adapter_of_no_product_changes_nothing():
    stream, norm, weight = normal(3, 40), a_norm(40, True), pack(32, 40, "float")
    empty = AdapterProducts((((),) * len(Place),))
    added = Added(rows_of([empty], [0, -1, 0]), 0)
    plain = kernels.normed_linear(stream, None, norm, weight, torch.float32)
    found = kernels.normed_linear(stream, None, norm, weight, torch.float32, added)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("weights", ["float", "int8", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (51, 75)])
def test_the_products_of_a_gated_weight_before_its_activation(weights, inputs, outputs):
    if weights == "bfloat16" and not kernels.serves_bfloat16("cpu"):
        pytest.skip("no instructions for bfloat16")
    parts = [(normal(outputs, inputs, seed=s), normal(outputs, seed=s + 1)) for s in (3, 5)]
    x = normal(5, inputs, seed=9)
    gated = kernels.pack_gated(*parts, weights)
    found = gated.unactivated(x)
    wanted = [kernels.pack_linear(*part, weights).linear(x, None, None) for part in parts]
    assert len(found) == 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    (alone,) = kernels.pack_linear(*parts[0], weights).unactivated(x)
    assert torch.equal(alone, wanted[0])


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "silu"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (9, 1000)])
def test_activations_of_whole_rows_and_no_number_depends_on_its_place(kind, shape):
    x = normal(*shape, seed=5) * 4
    found = kernels.activation(x, kind)
    torch.testing.assert_close(found, reference.activation.activation(x.double(), kind).float())
    for row in range(shape[0]):
        assert torch.equal(kernels.activation(x[row:, 1:].contiguous(), kind), found[row:, 1:])
