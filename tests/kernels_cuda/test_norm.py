import pytest
import torch

from nightjar.kernels import cuda, reference
from tests.kernels_cuda.devices import assert_near, poisoned, random, storages

COLUMNS = [1, 64, 111, 500, 520, 1300]
"""A warp a row or a block; whole vectors or single elements; tails."""


def wanted_norm(residual, delta, weight, bias, epsilon):
    """Stream and result in float64."""
    stream = residual.double() if delta is None else residual.double() + delta.double()
    centred = stream if bias is None else stream - stream.mean(-1, keepdim=True)
    size = (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return stream, centred / size * weight.double() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, 5])
def test_layer_norm_adds_the_delta_and_normalises(device, rows, columns):
    residual = random((rows, columns), seed=1, scale=3.0)
    delta = random((rows, columns), torch.float16, seed=2)
    weight, bias = random(columns, seed=3), random(columns, seed=4)
    stream, wanted = wanted_norm(residual, delta, weight, bias, 1e-5)
    given = [x.to(device) for x in (residual, delta, weight, bias)]
    out = cuda.norm.layer_norm(*given, 1e-5, torch.float16)
    assert_near(given[0], stream)
    assert_near(out, wanted, absolute=1e-5)


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize("columns", [96, 111, 1300])
def test_rms_norm_of_every_storage(device, storage, columns):
    dtype = storages[storage]
    residual, delta = random((3, columns), scale=2.0), random((3, columns), dtype, seed=2)
    weight = random(columns, seed=3)
    stream, wanted = wanted_norm(residual, delta, weight, None, 1e-6)
    given = [x.to(device) for x in (residual, delta, weight)]
    out = cuda.norm.rms_norm(*given, 1e-6, dtype)
    assert_near(given[0], stream)
    assert_near(out, wanted, absolute=1e-5)


def test_the_reference_agrees(device):
    """The torch path that serves the CPU gives the same numbers."""
    residual, delta = random((4, 320)), random((4, 320), torch.bfloat16, seed=1)
    weight, bias = random(320, seed=2), random(320, seed=3)
    kept = residual.clone()
    wanted = reference.norm.layer_norm(kept, delta, weight, bias, 1e-5, torch.float32)
    stream = residual.to(device)
    given = [x.to(device) for x in (delta, weight, bias)]
    got = cuda.norm.layer_norm(stream, given[0].float(), *given[1:], 1e-5, torch.float32)
    assert_near(got, wanted, ulps=16, absolute=1e-5)
    assert_near(stream, kept)


def test_the_stream_stays_as_it_is_without_a_delta(device):
    residual, weight = random((2, 768)).to(device), random(768, seed=1).to(device)
    before = residual.clone()
    out = cuda.norm.rms_norm(residual, None, weight, 1e-6, torch.bfloat16)
    assert torch.equal(residual, before)
    _, wanted = wanted_norm(before.cpu(), None, weight.cpu(), None, 1e-6)
    assert_near(out, wanted, absolute=1e-5)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
def test_heads_inside_a_packed_projection_are_normalised_in_place(device, head_size):
    packed = random((3, 6, head_size), torch.bfloat16).to(device)
    before, weight = packed.clone(), random(head_size, seed=1).to(device)
    heads = packed[:, :2]
    cuda.norm.rms_norm(heads, None, weight, 1e-6, torch.bfloat16, out=heads)
    _, wanted = wanted_norm(before[:, :2].cpu(), None, weight.cpu(), None, 1e-6)
    assert_near(heads, wanted, absolute=1e-5)
    assert torch.equal(packed[:, 2:], before[:, 2:])


def test_a_far_mean_costs_layer_norm_no_precision(device):
    """The variance is that of the centred values: mean(x^2) - mean(x)^2 would be lost here."""
    residual = random((2, 600)) + 1000.0
    weight, bias = torch.ones(600), torch.zeros(600)
    _, wanted = wanted_norm(residual, None, weight, bias, 1e-5)
    given = [x.to(device) for x in (weight, bias)]
    out = cuda.norm.layer_norm(residual.to(device), None, *given, 1e-5, torch.float32)
    assert_near(out, wanted, absolute=2e-4)


def test_rows_do_not_depend_on_their_batch(device):
    residual, weight = random((9, 700)).to(device), random(700, seed=1).to(device)
    together = cuda.norm.rms_norm(residual, None, weight, 1e-6, torch.float32)
    for row in (0, 4, 8):
        alone = cuda.norm.rms_norm(residual[row : row + 1], None, weight, 1e-6, torch.float32)
        assert torch.equal(alone[0], together[row])


def test_a_row_that_is_not_finite_keeps_to_itself(device):
    residual, weight = random((4, 600)), random(600, seed=1)
    residual[1, 7] = float("nan")
    given = residual.to(device), weight.to(device)
    out = cuda.norm.rms_norm(given[0], None, given[1], 1e-6, torch.float16).cpu()
    assert out[1].isnan().all()
    assert out[[0, 2, 3]].isfinite().all()


def test_no_rows_are_no_work(device):
    out = cuda.norm.rms_norm(
        torch.empty(0, 64, device=device), None, torch.ones(64, device=device), 1e-6, torch.float16
    )
    assert out.shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(63)}, "weight has shape"),
        ({"weight": torch.ones(64).half()}, "weight is float16"),
        ({"delta": torch.ones(2, 64).T.contiguous().T}, "delta is not contiguous"),
        ({"delta": torch.ones(2, 63)}, "delta has shape"),
        ({"residual": torch.ones(2, 64).half(), "delta": torch.ones(2, 64)}, "must be float32"),
        ({"residual": torch.ones(64, 2).T}, "rows side by side"),
        ({"residual": torch.ones(2, 64).double()}, "residual is float64"),
        ({"residual": torch.ones(1, 20_000), "weight": torch.ones(20_000)}, "too long"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {"residual": torch.ones(2, 64), "delta": None, "weight": torch.ones(64)} | change
    with pytest.raises(ValueError, match=message):
        cuda.norm.rms_norm(given["residual"], given["delta"], given["weight"], 1e-6, torch.float32)


def test_columns_that_nobody_wrote_do_not_come_in(device):
    """Heads of other rows, beside the view, hold NaN."""
    packed = poisoned((4, 5, 64), torch.float16)
    packed[:, 1:3] = random((4, 2, 64), torch.float16)
    heads = packed.to(device)[:, 1:3]
    out = cuda.norm.rms_norm(heads, None, torch.ones(64, device=device), 1e-6, torch.float16)
    assert out.isfinite().all()
