"""The parts of a block that a backend may compute in one call, against their ops one by one."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import Norm, native
from nightjar.kernels.native.int8_linear import INNER_RANGE
from nightjar.kernels.native.products import PanelWeight
from tests.backends import BACKENDS, use_backend
from tests.cpu_blocks import a_norm, normal, pack, pack_up

PRECISIONS = {"torch": ["float", "int8"], "native": ["float", "bfloat16", "int8"]}
"""Of weights, by the backends that have them."""


def pytest_generate_tests(metafunc):
    """Every test by every backend, in each of its precisions where it takes one."""
    if "precision" not in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, indirect=True)
        return
    cases = [(backend, precision) for backend in BACKENDS for precision in PRECISIONS[backend]]
    if not native.float_linear.serves_bfloat16():
        cases.remove(("native", "bfloat16"))
    metafunc.parametrize(("backend", "precision"), cases, indirect=["backend"])


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    if request.param == "native" and not native.int8_linear.serves():
        pytest.skip("this processor has no VNNI")
    return use_backend(request.param, monkeypatch)


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    ("rows", "size", "out"), [(1, 64, 96), (29, 48, 50), (200, 260, 33), (1100, 48, 50)]
)
def test_normed_linear_is_the_product_of_the_normalised_rows(
    precision, layer_norm, with_delta, rows, size, out
):
    residual, norm, weight = (
        normal(rows, size),
        a_norm(size, layer_norm),
        pack(out, size, precision),
    )
    delta = normal(rows, size, seed=9) if with_delta else None
    stream = residual.clone()
    found = kernels.normed_linear(stream, delta, norm, weight, torch.float32)
    expected = kernels.linear(kernels.normalize(residual, delta, norm, torch.float32), weight)
    assert torch.equal(found, expected)
    assert torch.equal(stream, residual)  # both took delta in


@pytest.mark.parametrize(("rows", "size", "out"), [(1, 64, 96), (29, 40, 50), (1100, 48, 50)])
def test_rows_in_half_precision_are_rounded_once(precision, rows, size, out):
    norm, weight = a_norm(size, True), pack(out, size, precision)
    whole = kernels.normed_linear(normal(rows, size), None, norm, weight, torch.float32)
    halves = kernels.normed_linear(normal(rows, size), None, norm, weight, torch.float16)
    assert torch.equal(halves, whole.half())
    back = pack(size, out, precision)
    if precision == "int8" or isinstance(back, PanelWeight):  # torch takes FP32 rows alone
        assert torch.equal(kernels.linear(halves, back), kernels.linear(halves.float(), back))


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize(
    ("rows", "size", "inner"), [(1, 64, 96), (31, 50, 130), (90, 132, 272), (1100, 48, 96)]
)
def test_what_goes_onto_the_stream_is_added_there_or_returned(
    backend, precision, kind, rows, size, inner
):
    residual, x, norm = normal(rows, size), normal(rows, inner, seed=9), a_norm(size, True)
    up, down = pack_up(kind, inner, size, precision), pack(size, inner, precision, seed=7)
    expected = residual + kernels.linear(x, down)
    stream = residual.clone()
    left = kernels.linear_onto(stream, x, down)
    assert (left is None) == (backend == "native")
    assert torch.equal(stream if left is None else stream + left, expected)
    block = norm, up, down, "silu", torch.float32
    delta = normal(rows, size, seed=11)
    stream = residual.clone()
    added = kernels.feed_forward(stream, delta, *block)
    expected = stream + added
    stream = residual.clone()
    left = kernels.feed_forward_onto(stream, delta, *block)
    assert (left is None) == (backend == "native")
    assert torch.equal(stream if left is None else stream + left, expected)


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu", "silu"])
@pytest.mark.parametrize(
    ("rows", "size", "inner"), [(1, 64, 96), (31, 48, 130), (90, 132, 272), (1100, 48, 96)]
)
def test_feed_forward_is_its_products_one_by_one(precision, kind, activation, rows, size, inner):
    residual, delta, norm = normal(rows, size), normal(rows, size, seed=9), a_norm(size, True)
    up, down = pack_up(kind, inner, size, precision), pack(size, inner, precision, seed=7)
    stream = residual.clone()
    found = kernels.feed_forward(stream, delta, norm, up, down, activation, torch.float32)
    x = kernels.normalize(residual, delta, norm, torch.float32)
    widened = kernels.linear(x, up, activation)
    expected = kernels.linear(widened, down)
    assert torch.equal(stream, residual)
    if precision != "int8":
        assert torch.equal(found, expected)
    else:
        # Half precision in between moves a value by 2^-11 of itself, and so now and then over the
        # border between two of its row's 254 steps.
        off = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert off < 0.004


@pytest.mark.parametrize("kinds", [("float", "int8"), ("int8", "float")])
def test_a_block_of_two_kinds_of_weights_is_its_products(kinds):
    residual, norm = normal(9, 64), a_norm(64, True)
    up, down = pack(96, 64, kinds[0]), pack(64, 96, kinds[1], seed=7)
    x = kernels.normalize(residual.clone(), None, norm, torch.float32)
    expected = kernels.linear(kernels.linear(x, up, "relu"), down)
    found = kernels.feed_forward(residual, None, norm, up, down, "relu", torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_rows_of_a_block_do_not_depend_on_their_company(precision, kind):
    residual, delta, norm = normal(120, 64), normal(120, 64, seed=9), a_norm(64, False)
    up, down = pack_up(kind, 96, 64, precision), pack(64, 96, precision, seed=7)

    def block(rows):
        stream = residual[rows].clone()
        return kernels.feed_forward(stream, delta[rows], norm, up, down, "silu", torch.float32)

    whole = block(slice(None))
    for rows in (slice(0, 1), slice(3, 8), slice(17, 30), slice(50, 119)):
        assert torch.equal(block(rows), whole[rows])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_its_neighbours_do_not_feel_it(precision, bad):
    residual, norm = normal(20, 64), a_norm(64, True)
    up, down = pack(96, 64, precision), pack(64, 96, precision, seed=7)
    clean = kernels.feed_forward(residual.clone(), None, norm, up, down, "gelu", torch.float32)
    residual[4, 5] = bad
    found = kernels.feed_forward(residual, None, norm, up, down, "gelu", torch.float32)
    others = [row for row in range(20) if row != 4]
    assert not found[4].isfinite().any()
    assert torch.equal(found[others], clean[others])


def test_large_numbers_between_the_products_are_kept_up_to_the_stated_range(backend):
    residual, size = normal(6, 64), 64
    down = kernels.pack_linear(torch.eye(size), None, "int8")

    def largest(factor):
        norm = Norm(torch.full((size,), float(factor)), None, 1e-5)
        up = kernels.pack_linear(torch.eye(size), None, "int8")
        return kernels.feed_forward(residual.clone(), None, norm, up, down, "relu", torch.float32)

    inside = largest(INNER_RANGE / 8)
    assert inside.isfinite().all()
    assert inside.max() > INNER_RANGE / 8
    if backend == "native":
        assert not largest(INNER_RANGE).isfinite().all()


def test_small_numbers_between_the_products_keep_their_digits():
    norm = Norm(torch.full((64,), 0.05), None, 1e-5)
    residual, up = normal(6, 64), kernels.pack_linear(torch.eye(64), None, "int8")
    found = kernels.feed_forward(residual.clone(), None, norm, up, up, "relu", torch.float32)
    expected = kernels.normalize(residual, None, norm, torch.float32).relu()
    # Two roundings to half a step of a row's largest number.
    bound = expected.amax(-1, keepdim=True) * (0.5 / 127) * 2.2
    assert ((found - expected).abs() <= bound).all()


REFUSED = {"native": ValueError, "torch": RuntimeError}


def test_other_shapes_and_dtypes_are_refused(backend, precision):
    norm, weight = a_norm(64, True), pack(32, 64, precision)
    with pytest.raises(REFUSED[backend]) as width:
        kernels.normed_linear(normal(3, 60), None, norm, weight, torch.float32)
    doubled = Norm(norm.weight.double(), norm.bias.double(), 1e-5)
    with pytest.raises(REFUSED[backend]) as dtype:
        kernels.normed_linear(normal(3, 64), None, doubled, weight, torch.float32)
    with pytest.raises(REFUSED[backend]) as inner:
        kernels.feed_forward(
            normal(3, 64), None, norm, weight, pack(64, 96, precision), "relu", torch.float32
        )
    if backend == "native":
        assert "rows of 60, a norm of 64, a weight of 64 inputs" in str(width.value)
        assert "a norm's weight is torch.float64" in str(dtype.value)
        with pytest.raises(ValueError, match=r"3 rows of 32 go onto a stream \[3, 64\]"):
            kernels.linear_onto(normal(3, 64), normal(3, 64), weight)
        with pytest.raises(ValueError, match="48 channels go onto a stream of 64"):
            kernels.feed_forward_onto(
                normal(3, 64), None, norm, weight, pack(48, 32, precision), "relu", torch.float32
            )
        assert "32 channels go up, 96 come down" in str(inner.value)
