"""What weights in bfloat16 have beside those in FP32 (test_kernels_float.py has what both have)."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import native
from tests.cpu_blocks import a_norm, normal, pack
from tests.float_products import case

needs_bfloat16 = pytest.mark.skipif(
    not native.float_linear.serves_bfloat16(),
    reason="this processor has no instructions for bfloat16 that the kernels use",
)


@needs_bfloat16
def test_the_largest_floats_are_rounded_to_infinity_in_their_row_alone():
    x, weight, bias = case(8, 40, 20)
    packed = kernels.pack_linear(weight, bias, "bfloat16")
    clean = kernels.linear(x, packed)
    x[3, 7] = 3.4e38
    found = kernels.linear(x, packed)
    assert not found[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[kept], clean[kept])


@needs_bfloat16
def test_rows_in_half_precision_are_those_in_floats():
    x, weight, bias = case(5, 51, 60)
    packed = kernels.pack_linear(weight, bias, "bfloat16")
    halves = x.half()
    assert torch.equal(kernels.linear(halves, packed), kernels.linear(halves.float(), packed))


@needs_bfloat16
def test_what_lies_between_two_products_past_their_columns_is_zero():
    norm = a_norm(64, True)
    up, down = pack(3072, 64, "bfloat16"), pack(64, 3072, "bfloat16")
    none = torch.full((40, 64), torch.nan)
    left = kernels.feed_forward(none, None, norm, up, down, "silu", torch.float32)
    assert left.isnan().all()  # and so were the rows between the products
    for inner in (48, 80, 144):
        up, down = pack(inner, 64, "bfloat16"), pack(64, inner, "bfloat16", seed=7)
        residual = normal(40, 64)
        found = kernels.feed_forward(residual, None, norm, up, down, "relu", torch.float32)
        between = kernels.normed_linear(residual, None, norm, up, torch.float32).relu()
        assert torch.equal(found, kernels.linear(between, down))


@needs_bfloat16
def test_weights_take_half_the_memory_of_floats():
    _, weight, bias = case(1, 768, 96)
    halves = kernels.pack_linear(weight, bias, "bfloat16").panels
    assert 2 * halves.nbytes == kernels.pack_linear(weight, bias).panels.nbytes


@needs_bfloat16
@pytest.mark.parametrize("features", [8, 51])
def test_rows_of_a_table_are_those_of_the_weight(features):
    _, weight, _ = case(1, features, 60)
    packed = kernels.pack_linear(weight, None, "bfloat16")
    found = native.float_linear.rows(packed, torch.tensor([59, 60, 0, 1000, 47, 48]))
    assert torch.equal(found[[0, 2, 4, 5]], weight[[59, 0, 47, 48]].bfloat16().float())
    assert not found[[1, 3]].any()


def test_a_processor_without_them_is_told(monkeypatch):
    monkeypatch.setattr(native.float_linear, "serves_bfloat16", lambda: False)
    parts = torch.ones(4, 4), None
    with pytest.raises(ValueError, match="no products of bfloat16"):
        kernels.pack_linear(*parts, "bfloat16")
    with pytest.raises(ValueError, match="no products of bfloat16"):
        kernels.pack_gated(parts, parts, "bfloat16")
