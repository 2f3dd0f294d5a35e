"""Products of weights in FP8: rows as the definition rounds them, sums against float64."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nightjar.kernels import Norm, cuda, pack_gated, pack_linear, reference
from nightjar.kernels.cuda import fp8_packing, launch
from nightjar.kernels.cuda import linear as module
from nightjar.kernels.cuda.device import sums_in_fp8
from nightjar.kernels.cuda.fp8_packing import pack
from nightjar.kernels.cuda.linear import MAX_ROWS, SHARE, Factor
from nightjar.kernels.cuda.norm import normed_rows
from nightjar.kernels.cuda.product_rows import ROUNDED, round_rows
from nightjar.kernels.cuda.switches import Switches, using
from tests import fp8
from tests.kernels_cuda.activations import EXACT
from tests.kernels_cuda.devices import EPSILON, random

GROUPS = 2 * SHARE
"""Inputs that the warps of a block divide at a time."""


def rows_of(count, inputs, seed=0):
    """Rows of very different size, as they are in a model."""
    sizes = 10.0 ** torch.arange(count)[:, None].sub(3)
    return (random((count, inputs), seed=seed) * sizes).to(ROUNDED)


def factor(device, channels, inputs, seed=1, bias=True):
    """A weight in FP8, its bias, and the numbers that they stand for, in float64."""
    weight = random((channels, inputs), ROUNDED, seed, scale=inputs**-0.5)
    weight *= 2.0 ** (torch.arange(channels)[:, None] % 5 - 2)
    codes, scales = reference.fp8_linear.quantised(weight)
    added = random(channels, ROUNDED, seed + 1) if bias else None
    exact = reference.fp8_linear.numbers(codes).double() * scales.double()[:, None]
    found = Factor(codes, added, scales)
    on_device = Factor(*(part if part is None else part.to(device) for part in found))
    return on_device, (exact, None if added is None else added.double())


def kept(x):
    """The numbers that rows stand for after they are rounded, in float64."""
    codes, scales = reference.fp8_linear.quantised(x.cpu())
    return reference.fp8_linear.numbers(codes).double() * scales.double()[:, None]


def product(x, exact):
    """In float64, of the very numbers that the kernel multiplies."""
    weight, bias = exact
    y = kept(x) @ weight.T
    return y if bias is None else y + bias


FP8_SUMS = {"cpu": 2e-6, "cuda": 2.0**-10}
"""What tensor cores of FP8 lose of a sum, beside the largest of its row.

A Hopper keeps about 14 bits (arXiv 2412.19437, section 3.3.2).
"""


def close(got, wanted, ulps=1.0, slack=2e-6):
    """Sums of hundreds of products in FP32 in some order, beside the largest of their row."""
    if got.numel():
        sizes = wanted.abs().amax(-1, keepdim=True)
        relative = ulps * EPSILON[got.dtype]
        scaled = (got.double().cpu() / sizes, wanted / sizes)
        torch.testing.assert_close(*scaled, rtol=relative, atol=slack, equal_nan=True)


def some_rows(inputs):
    """Zeros, numbers below the least normal one, the edges of codes, huge and common numbers."""
    edges = torch.tensor([1.0625, 1.1875, -0.0009765625, 0.0029296875, 0.0146484375, 0.015625, 0.0])
    found = torch.zeros(10, inputs)
    for row, peak in enumerate((0.0, 448.0, 449.0, 464.0, 1.0, 2.0**-14, 65504.0, 1e-42, 2e38)):
        found[row, 0] = peak
        found[row, 1:8] = edges * min(peak, 1.0)
        found[row, 8:15] = edges * peak / 448
    found[9] = random(inputs, seed=3)
    return found.to(ROUNDED)


@pytest.mark.parametrize(("inputs", "padded"), [(16, 16), (24, 32), (33, 48), (2056, 2064)])
def test_codes_and_scales_are_those_of_the_definition(device, inputs, padded):
    """Also of rows that lie apart, and in the reference."""
    x = some_rows(inputs)
    found = round_rows(x.to(device), padded)
    codes, scales = found.codes.cpu(), found.scales.cpu()
    for index, row in enumerate(x):
        code, scale = fp8.product_row(row.float().numpy())
        assert codes[index, :inputs].tolist() == code.tolist(), row
        assert scales[index].item() == scale, row
    assert not codes[:, inputs:].any()
    apart = torch.stack([x, x * 0], 1).flatten(1).to(device)[:, :inputs]
    again = round_rows(apart, padded)
    assert torch.equal(again.codes.cpu(), codes)
    plain = reference.fp8_linear.quantised(x)
    assert torch.equal(plain[0], codes[:, :inputs])
    assert torch.equal(plain[1], scales)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_by_its_scale(device, wrong):
    x = random((3, 48), ROUNDED)
    x[1, 17] = wrong
    found = round_rows(x.to(device), 48)
    assert found.scales.isnan().tolist() == [False, True, False]
    assert not found.codes[1].any()


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("columns", [48, 1040, 4112])
@pytest.mark.parametrize("delta", [None, torch.float32, ROUNDED])
def test_a_norm_rounds_its_rows_as_they_are_rounded_after_it(device, centred, columns, delta):
    stream = random((5, columns), scale=7.0).to(device)
    stream[3, 5] = float("inf")
    added = None if delta is None else random((5, columns), delta, seed=2).to(device)
    bias = random(columns, seed=8).to(device) if centred else None
    norm = Norm(random(columns, seed=7).to(device) + 1, bias, 1e-5)
    plain, whole = stream.clone(), stream.clone()
    found = normed_rows(whole, added, norm)
    parts = (norm.weight,) if bias is None else (norm.weight, bias)
    normalise = cuda.norm.layer_norm if centred else cuda.norm.rms_norm
    wanted = round_rows(normalise(plain, added, *parts, norm.epsilon, ROUNDED), columns)
    assert torch.equal(whole, plain)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1))
    assert found.scales.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    "inputs", [16, 48, 64, 144, GROUPS - 16, GROUPS, GROUPS + 16, 2 * GROUPS + 80]
)
def test_every_input_counts_once(device, inputs):
    x, (given, exact) = rows_of(3, inputs), factor(device, 20, inputs)
    got = cuda.linear.linear(x.to(device), given)
    assert got.dtype == ROUNDED
    close(got, product(x, exact))


@pytest.mark.parametrize("rows", range(MAX_ROWS + 1))
def test_every_number_of_rows(device, rows):
    x, (given, exact) = rows_of(rows, 144), factor(device, 33, 144)
    close(cuda.linear.linear(x.to(device), given), product(x, exact))


@pytest.mark.parametrize("channels", [1, 7, 8, 9, 15, 16, 17, 250, 16 * 272 - 3])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_channel_is_written_once_with_its_own_scale(device, channels, gated, bias):
    """Up to more tiles than the blocks that an H200 is given, 264."""
    x, (given, exact) = random((5, 80), ROUNDED), factor(device, channels, 80, bias=bias)
    gate, exact_gate = factor(device, channels, 80, seed=5, bias=bias) if gated else (None, None)
    got = cuda.linear.linear(x.to(device), given, "silu", gate, wide=True)
    wanted = product(x, exact)
    wanted = EXACT["silu"](product(x, exact_gate)) * wanted if gated else EXACT["silu"](wanted)
    close(got, wanted, ulps=16)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_what_is_added_to_the_stream_is_not_rounded_first(device, rows):
    """Rows that lie apart."""
    x, (given, exact) = random((rows, 400), ROUNDED), factor(device, 40, 272)
    stream = random((rows, 40), seed=9)
    residual = stream.clone().to(device)
    cuda.linear.linear_onto(residual, x.to(device)[:, 128:], given)
    close(residual, stream.double() + product(x[:, 128:], exact), ulps=4)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (3, 16), (8, 144), (2, 400)])
def test_the_norm_before_it(device, centred, rows, inputs):
    """Its rows are rounded to 16 bits as those before a weight of 16 bits, and then to FP8.

    A product with the identity gives the rows of 16 bits.
    """
    stream = (random((rows, inputs), scale=5.0) + 2).to(device)
    bias = random(inputs, seed=8).to(device) if centred else None
    norm = Norm(random(inputs, seed=7).to(device) + 1, bias, 1e-5)
    given, exact = factor(device, 33, inputs)
    identity = torch.eye(inputs, dtype=ROUNDED, device=device)
    x = cuda.linear.normed_linear(stream, norm, Factor(identity))
    before = stream.clone()
    close(cuda.linear.normed_linear(stream, norm, given), product(x, exact))
    gate, exact_gate = factor(device, 33, inputs, seed=5)
    both = cuda.linear.normed_linear(stream, norm, given, "gelu", gate)
    close(both, EXACT["gelu"](product(x, exact_gate)) * product(x, exact), ulps=4)
    assert torch.equal(stream, before)


@pytest.mark.parametrize("normed", [False, True])
def test_no_rows_bits_depend_on_its_company(device, normed):
    """Alone, among eight, in another place, beside a row that is not finite."""
    given, _ = factor(device, 40, 144)
    norm = Norm(random(144, seed=7).to(device) + 1, random(144, seed=8).to(device), 1e-5)
    if normed:
        rows = random((8, 144)).to(device)
        run = partial(cuda.linear.normed_linear, norm=norm, factor=given)
    else:
        rows = rows_of(8, 144).to(device)
        run = partial(cuda.linear.linear, factor=given)
    whole = run(rows)
    for i in range(8):
        assert torch.equal(run(rows[i : i + 1])[0], whole[i])
    assert torch.equal(run(rows.flip(0)).flip(0), whole)
    others = [i for i in range(8) if i != 3]
    for wrong in (float("nan"), float("inf")):
        rows[3, 17] = wrong
        beside = run(rows)
        assert torch.equal(beside[others], whole[others])
        assert beside[3].isnan().all()


def test_a_weight_that_is_not_finite_reaches_its_channel_alone(device):
    weight = random((40, 64), ROUNDED)
    weight[39, 5] = float("inf")
    for rows in (2, 9):
        got = pack(weight.to(device), None).linear(
            random((rows, 64), ROUNDED).to(device), None, None
        )
        assert got[:, :39].isfinite().all()
        assert got[:, 39].isnan().all()


@pytest.mark.parametrize("after", [(ROUNDED, 1), (torch.uint8, 2), (torch.float16, 2)])
@pytest.mark.parametrize("inputs", [16, 2 * GROUPS + 16])
def test_what_is_asked_for_ahead_changes_nothing(device, after, inputs):
    """Weights of 8 and of 16 bits; on the host, what lies beside them is a fault."""
    dtype, count = after
    following = tuple(torch.ones(40, inputs, dtype=dtype, device=device) for _ in range(count))
    x, (given, _) = random((3, 80), ROUNDED).to(device), factor(device, 20, 80)
    wanted = cuda.linear.linear(x, given)
    assert torch.equal(cuda.linear.linear(x, given, following=following), wanted)
    half = random((20, 80), ROUNDED).to(device)
    wanted = cuda.linear.linear(x, Factor(half))
    assert torch.equal(cuda.linear.linear(x, Factor(half), following=following), wanted)


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
@pytest.mark.parametrize(("channels", "inputs"), [(48, 64), (33, 80), (17, 40), (7, 33)])
@pytest.mark.parametrize("kind", ["relu", None])
def test_few_rows_and_many_multiply_the_same_numbers(device, rows, channels, inputs, kind):
    """Also of weights that are filled up."""
    weight = random((channels, inputs), ROUNDED, scale=inputs**-0.5)
    bias, x = random(channels, ROUNDED, seed=1), rows_of(rows, inputs)
    packed = pack_linear(weight.to(device), bias.to(device), "fp8")
    exact = kept(x) @ kept(weight).T + bias.double()
    exact = EXACT[kind](exact) if kind else exact
    slack = 2e-6
    if rows > MAX_ROWS or inputs % 16:
        slack = max(FP8_SUMS[device], EPSILON[sums_in_fp8(packed.codes)])
    for dtype in (None, torch.float32):
        got = packed.linear(x.to(device), kind, dtype)
        assert got.dtype == (dtype or ROUNDED)
        assert got.is_contiguous()
        close(got, exact, ulps=2 if dtype is None else 40, slack=slack)
    stream = torch.ones(rows, channels, device=device)
    assert packed.linear_onto(stream, x.to(device)) == (rows <= MAX_ROWS and inputs % 16 == 0)


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_a_norm_before_few_rows_and_many(device, rows, gated, delta):
    stream, inputs = random((rows, 64), scale=3.0), 64
    norm = Norm((random(64, seed=7) + 1).to(device), random(64, seed=8).to(device), 1e-5)
    parts = [(random((48, inputs), ROUNDED, seed, scale=0.1).to(device), None) for seed in (1, 2)]
    packed = pack_gated(*parts, "fp8") if gated else pack_linear(*parts[1], "fp8")
    added = random((rows, 64), ROUNDED, seed=4).to(device) if delta else None
    found, plain = stream.clone().to(device), stream.clone().to(device)
    x = cuda.norm.layer_norm(plain, added, norm.weight, norm.bias, norm.epsilon, ROUNDED)
    got = packed.normed_linear(found, added, norm, "silu", ROUNDED)
    if delta and rows == 3:
        assert got is None
        got = packed.linear(x, "silu", None)
    else:
        assert torch.equal(found, plain)
    wanted = [kept(x) @ kept(weight.cpu()).T for weight, _ in parts]
    silu = EXACT["silu"]
    slack = 2e-6 if rows <= MAX_ROWS else FP8_SUMS[device]
    close(got, silu(wanted[0]) * wanted[1] if gated else silu(wanted[1]), ulps=4, slack=slack)
    for rounded, exact in zip(packed.unactivated(x), wanted if gated else wanted[1:], strict=True):
        close(rounded, exact, slack=slack)


PLACES = [
    ((9, 0), "13.0"),
    ((9, 0), "12.8"),
    ((8, 9), "13.0"),
    ((10, 0), "13.0"),
    ((12, 0), "13.1"),
]


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_float32_is_asked_of_torch_where_it_gives_that(number, monkeypatch):
    """Elsewhere it refuses, and sums in bfloat16 are widened before the bias is added."""
    (capability, release), asked = PLACES[number], []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", release)
    given = SimpleNamespace(is_cuda=True, get_device=lambda: 100 + number)
    widest = sums_in_fp8(given)
    assert widest == (torch.bfloat16 if number else torch.float32)
    multiply = fp8_packing.F.scaled_mm

    def as_there(*given, output_dtype, **more):
        asked.append(output_dtype)
        if output_dtype not in (ROUNDED, widest):
            raise ValueError("Only bf16 high precision output types are supported")
        return multiply(*given, output_dtype=output_dtype, **more)

    monkeypatch.setattr(fp8_packing.F, "scaled_mm", as_there)
    monkeypatch.setattr(fp8_packing, "sums_in_fp8", lambda _: widest)
    weight, bias, x = random((48, 64), ROUNDED), random(48, ROUNDED, seed=1), rows_of(9, 64)
    rounded = fp8_packing.Fp8Rows(*reference.fp8_linear.quantised(x))
    found = pack(weight, bias).product(rounded, torch.float32)
    assert asked == [widest]
    assert found.dtype == torch.float32
    close(found, product(x, (kept(weight), bias.double())), slack=max(2e-6, EPSILON[widest]))


def test_what_it_serves(monkeypatch):
    """Few rows in whole loads that fit into shared memory; off by its switch."""
    codes, x = torch.zeros(16, 64, dtype=torch.uint8), torch.zeros(9, 64, dtype=ROUNDED)
    assert cuda.linear.serves_rows(x[:8], codes)
    assert not cuda.linear.serves_rows(x, codes)
    assert not cuda.linear.serves_rows(x[:8, :40], codes[:, :40].contiguous())
    monkeypatch.setattr(module, "block_shared_bytes", lambda _: 99 << 10)
    wide = torch.zeros(1, 11584, dtype=torch.uint8)
    assert cuda.linear.serves_rows(wide.to(ROUNDED), wide)
    wider = torch.zeros(1, 11600, dtype=torch.uint8)
    assert not cuda.linear.serves_rows(wider.to(ROUNDED), wider)
    weight = pack(torch.ones(16, 64, dtype=ROUNDED), None)
    assert weight.is_small(x[:8])
    with using(Switches(small_products=False)):
        assert not weight.is_small(x[:8])


def test_rows_in_fp8_fit_into_the_devices_shared_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "block_shared_bytes", lambda _: 99 << 10)
    weight = Factor(torch.zeros(16, 11584, dtype=torch.uint8), None, torch.ones(16))
    normed = Factor(torch.zeros(16, 5776, dtype=torch.uint8), None, torch.ones(16))
    with launch.using(lambda *given: asked.append(given[-1])):
        cuda.linear.linear(torch.zeros(8, 11584, dtype=ROUNDED), weight)
        cuda.linear.normed_linear(torch.zeros(8, 5776), Norm(torch.ones(5776), None, 1e-5), normed)
    assert all(one + module.SUMS_BYTES <= 99 << 10 for one in asked)


def test_weights_know_what_is_read_after_them():
    """An LM head of 16 bits behind a weight in FP8, and the other way round."""
    weight = random((32, 64), ROUNDED)
    narrow, whole = pack(weight, None), cuda.packing.pack_linear(weight, None)
    assert narrow.followed_by(whole).following == (weight,)
    assert whole.followed_by(narrow).following == (narrow.codes,)
    gated = fp8_packing.pack_gated((weight, None), (weight, None))
    assert len(narrow.followed_by(gated).following) == 2
    assert gated.followed_by(whole).up.following == (weight,)


X, CODES = torch.zeros(2, 64, dtype=ROUNDED), torch.zeros(16, 64, dtype=torch.uint8)
FACTOR, BARE = Factor(CODES, None, torch.ones(16)), Factor(CODES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda.linear.linear(X.half(), FACTOR), "x is float16"),
        (lambda: cuda.linear.linear(X, BARE), "x is bfloat16: give uint8"),
        (lambda: cuda.linear.linear(X, Factor(CODES, None, torch.ones(15))), "scales has shape"),
        (
            lambda: cuda.linear.linear(X, FACTOR, None, BARE),
            "scales of the gate: both weights",
        ),
        (
            lambda: cuda.linear.linear(X, Factor(CODES, X[0, :16].half(), torch.ones(16))),
            "bias is float16",
        ),
        (lambda: round_rows(X.half(), 64), "x is float16"),
        (lambda: round_rows(X, 48), "64 inputs are more than the 48"),
        (
            lambda: normed_rows(torch.zeros(2, 6), None, Norm(torch.ones(6), None, 1e-5)),
            "rows in FP8 of 6 columns",
        ),
        (
            lambda: normed_rows(X.float(), X.half(), Norm(torch.ones(64), None, 1e-5)),
            "delta is torch.float16: it must be torch.bfloat16 or float32",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_definition_keeps_a_row_within_a_sixteenth():
    """Of the numbers that are not small beside the largest one."""
    x = random((4, 64), ROUNDED)
    found = fp8.product_numbers(x)
    assert torch.equal(found, kept(x))
    large = x.abs() > x.abs().amax(-1, keepdim=True) / 448 / 64
    assert ((found - x.double()).abs() <= x.double().abs() / 16)[large].all()
    assert np.isfinite(found.numpy()).all()
