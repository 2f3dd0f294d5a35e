from dataclasses import replace
from functools import partial

import pytest
import torch

from nightjar.kernels import Norm, cuda, pack_linear, reference
from nightjar.kernels.cuda import kernel_budget, launch, packing
from nightjar.kernels.cuda import linear as module
from nightjar.kernels.cuda.linear import MAX_NORMED_INPUTS, MAX_ROWS, SHARE, STORAGE
from nightjar.kernels.cuda.packing import sum_in_fp32
from tests.kernels_cuda.activations import EXACT
from tests.kernels_cuda.devices import EPSILON, assert_near, random

storages = pytest.mark.parametrize("dtype", STORAGE, ids=["float16", "bfloat16"])


def factor(channels, inputs, dtype=torch.float16, seed=1, bias=True):
    """A weight under which numbers keep their size, and its bias."""
    weight = random((channels, inputs), dtype, seed, scale=inputs**-0.5)
    return weight, random(channels, dtype, seed + 1) if bias else None


def norm_of(inputs, centred=True):
    bias = random(inputs, seed=8) if centred else None
    return Norm(random(inputs, seed=7) + 1, bias, 1e-5)


def moved(given, device):
    return None if given is None else tuple(t if t is None else t.to(device) for t in given)


def exact(x, given):
    """In float64, of the very numbers that the kernel reads."""
    weight, bias = given
    y = x.double().cpu() @ weight.double().T
    return y if bias is None else y + bias.double()


def close(got, wanted, slack=1e-4):
    """slack: sums of hundreds of products in FP32 in some order."""
    assert_near(got, wanted, ulps=1.0, absolute=slack)


@storages
@pytest.mark.parametrize("inputs", [8, 40, 64, SHARE - 8, SHARE, SHARE + 8, 3 * SHARE + 72])
def test_every_input_counts_once(device, dtype, inputs):
    x, given = random((3, inputs), dtype), factor(20, inputs, dtype)
    got = cuda.linear.linear(x.to(device), moved(given, device))
    assert got.dtype == dtype
    close(got, exact(x, given))


@pytest.mark.parametrize("channels", [1, 7, 8, 9, 15, 16, 17, 64, 250])
@pytest.mark.parametrize("gated", [False, True])
def test_every_channel_is_written_once(device, channels, gated):
    x, given = random((2, 72), torch.float16), factor(channels, 72)
    gate = factor(channels, 72, seed=5) if gated else None
    got = cuda.linear.linear(x.to(device), moved(given, device), "silu", moved(gate, device))
    wanted = exact(x, given)
    wanted = EXACT["silu"](exact(x, gate)) * wanted if gated else EXACT["silu"](wanted)
    close(got, wanted)


@pytest.mark.parametrize("normed", [False, True])
def test_a_block_goes_on_to_its_next_tile(device, normed):
    """More tiles than the blocks that an H200 is given, 264."""
    inputs, channels = 64, 16 * 272 - 3
    given, norm = factor(channels, inputs), norm_of(inputs)
    stream = random((3, inputs))
    x = stream.half()
    if normed:
        there = Norm(norm.weight.to(device), norm.bias.to(device), norm.epsilon)
        got = cuda.linear.normed_linear(stream.to(device), there, moved(given, device))
        parts = (norm.weight.double(), norm.bias.double())
        x = reference.norm.layer_norm(stream.double(), None, *parts, 1e-5, torch.float64).half()
    else:
        got = cuda.linear.linear(x.to(device), moved(given, device))
    # A normalised number may be rounded to either side.
    close(got, exact(x, given), slack=8 * EPSILON[torch.float16] if normed else 1e-4)


@pytest.mark.parametrize(
    ("shape", "gated"),
    [((1, 8), False), ((40, SHARE + 8), False), ((40, 64), True), ((16 * 300, 8), True)],
)
@pytest.mark.parametrize("channels", [20, 500])
def test_what_is_asked_for_ahead_changes_nothing(device, shape, gated, channels):
    """Weights smaller and larger than what the next product's blocks begin with; on the host, what
    lies beside them is a fault."""
    x, given = random((3, 72), torch.float16).to(device), moved(factor(channels, 72), device)
    after = tuple(factor(*shape, seed=i)[0].to(device) for i in range(1 + gated))
    stream = random((3, 72)).to(device)
    norm = Norm(torch.ones(72, device=device), None, 1e-5)
    for call in (
        lambda **given_too: cuda.linear.linear(x, given, "relu", given, **given_too),
        lambda **given_too: cuda.linear.normed_linear(stream, norm, given, **given_too),
    ):
        assert torch.equal(call(following=after), call())
    residual = torch.zeros(3, channels, device=device)
    cuda.linear.linear_onto(residual, x, given, after)
    close(residual, exact(x.cpu(), moved(given, "cpu")))


@storages
@pytest.mark.parametrize("rows", range(MAX_ROWS + 1))
def test_every_number_of_rows(device, dtype, rows):
    x, given = random((rows, 136), dtype), factor(33, 136, dtype)
    close(cuda.linear.linear(x.to(device), moved(given, device)), exact(x, given))


@pytest.mark.parametrize("kind", [*EXACT, None])
@pytest.mark.parametrize("bias", [True, False])
def test_every_activation(device, kind, bias):
    x, given = random((5, 64), torch.bfloat16, scale=3.0), factor(24, 64, torch.bfloat16, bias=bias)
    gate = factor(24, 64, torch.bfloat16, seed=5, bias=bias)
    change = EXACT[kind] if kind else (lambda y: y)
    on_device = x.to(device), moved(given, device), kind
    close(cuda.linear.linear(*on_device), change(exact(x, given)))
    close(
        cuda.linear.linear(*on_device, moved(gate, device)),
        change(exact(x, gate)) * exact(x, given),
    )


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_that_lie_apart(device, rows):
    wide, given = random((rows, 200), torch.float16), factor(16, 64)
    x = wide.to(device)[:, 128:192]
    close(cuda.linear.linear(x, moved(given, device)), exact(wide[:, 128:192], given))


@storages
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_what_is_added_to_the_stream_is_not_rounded_first(device, dtype, rows):
    x, given = random((rows, 264), dtype), factor(40, 264, dtype)
    stream = random((rows, 40), seed=9)
    residual = stream.clone().to(device)
    cuda.linear.linear_onto(residual, x.to(device), moved(given, device))
    close(residual, stream.double() + exact(x, given), slack=1e-5)


@storages
@pytest.mark.parametrize("gated", [False, True])
def test_a_wide_result_is_not_rounded(device, dtype, gated):
    x, given = random((5, 264), dtype), factor(40, 264, dtype)
    gate = factor(40, 264, dtype, seed=5) if gated else None
    on_device = x.to(device), moved(given, device), "relu", moved(gate, device)
    got = cuda.linear.linear(*on_device, wide=True)
    assert got.dtype == torch.float32
    wanted = exact(x, gate).relu() * exact(x, given) if gated else exact(x, given).relu()
    close(got, wanted, slack=1e-5)


@storages
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_a_product_that_is_to_be_fp32_is_not_rounded_before(device, dtype, rows):
    """Few rows and many: cuBLAS writes FP32, too."""
    x, given = random((rows, 264), dtype), factor(40, 264, dtype)
    packed = packing.pack_linear(*moved(given, device))
    got = packed.linear(x.to(device), None, torch.float32)
    assert got.dtype == torch.float32
    close(got, exact(x, given), slack=1e-5)
    activated = packed.linear(x.to(device), "relu", torch.float32)
    close(activated, exact(x, given).relu(), slack=1e-5)


@storages
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (3, 8), (8, 136), (2, SHARE + 24)])
def test_the_norm_before_it(device, dtype, centred, rows, inputs):
    """As the norm by itself, rounded to the weight's dtype, and then the product."""
    stream, norm = random((rows, inputs), scale=5.0) + 2, norm_of(inputs, centred)
    given = factor(33, inputs, dtype)
    plain = reference.norm.layer_norm if centred else reference.norm.rms_norm
    parts = (norm.weight, norm.bias) if centred else (norm.weight,)
    normed = plain(stream.double(), None, *(p.double() for p in parts), norm.epsilon, torch.float64)
    on_device = replace(
        norm,
        weight=norm.weight.to(device),
        bias=None if norm.bias is None else norm.bias.to(device),
    )
    given_there = moved(given, device)
    residual = stream.clone().to(device)
    got = cuda.linear.normed_linear(residual, on_device, given_there)
    # A normalised number may be rounded to either side.
    slack = 8 * EPSILON[dtype]
    torch.testing.assert_close(got.double().cpu(), exact(normed, given), rtol=slack, atol=slack)
    assert torch.equal(residual.cpu(), stream)
    gate = factor(33, inputs, dtype, seed=5)
    both = cuda.linear.normed_linear(residual, on_device, given_there, "gelu", moved(gate, device))
    wanted = EXACT["gelu"](exact(normed, gate)) * exact(normed, given)
    torch.testing.assert_close(both.double().cpu(), wanted, rtol=4 * slack, atol=4 * slack)


def test_the_norm_of_rows_far_from_zero(device):
    """The mean is taken off before anything is squared."""
    norm, given = norm_of(64), factor(16, 64)
    stream = random((2, 64)) + 1000
    there = replace(norm, weight=norm.weight.to(device), bias=norm.bias.to(device))
    got = cuda.linear.normed_linear(stream.to(device), there, moved(given, device))
    double = (p.double() for p in (norm.weight, norm.bias))
    normed = reference.norm.layer_norm(stream.double(), None, *double, 1e-5, torch.float64)
    torch.testing.assert_close(got.double().cpu(), exact(normed, given), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("normed", [False, True])
def test_no_rows_bits_depend_on_its_company(device, normed):
    """Alone, among eight, in another place, beside a row that is not finite."""
    given, norm = moved(factor(40, 136), device), norm_of(136)
    norm = Norm(norm.weight.to(device), norm.bias.to(device), norm.epsilon)
    if normed:
        rows = random((8, 136)).to(device)
        run = partial(cuda.linear.normed_linear, norm=norm, factor=given)
    else:
        rows = random((8, 136), torch.float16).to(device)
        run = partial(cuda.linear.linear, factor=given)
    whole = run(rows)
    for i in range(8):
        assert torch.equal(run(rows[i : i + 1])[0], whole[i])
    assert torch.equal(run(rows.flip(0)).flip(0), whole)
    rows[3] = float("nan")
    others = [i for i in range(8) if i != 3]
    beside = run(rows)
    assert torch.equal(beside[others], whole[others])
    assert beside[3].isnan().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_reaches_its_channel_alone(device, value):
    x, (weight, bias) = random((2, 64), torch.float16), factor(40, 64)
    wanted = exact(x, (weight, bias))
    weight[39, 5] = value
    got = cuda.linear.linear(x.to(device), moved((weight, bias), device)).cpu()
    close(got[:, :39], wanted[:, :39])
    assert not got[:, 39].isfinite().any()


def test_what_it_serves():
    """Few rows of 16 bits in whole loads: of the shapes alone."""
    weight, x = torch.zeros(16, 64, dtype=torch.half), torch.zeros(9, 64, dtype=torch.half)
    assert cuda.linear.serves_rows(x[:8], weight)
    assert not cuda.linear.serves_rows(x, weight)
    assert not cuda.linear.serves_rows(x[:8].float(), weight.float())
    assert not cuda.linear.serves_rows(x[:8, :60], weight[:, :60].contiguous())
    assert not cuda.linear.serves_rows(x.flatten()[4:516].view(8, 64), weight)
    stream = torch.zeros(8, MAX_NORMED_INPUTS + 8)
    assert cuda.linear.serves_norm(stream[:, :64].contiguous(), weight)
    wide = torch.zeros(1, MAX_NORMED_INPUTS + 8, dtype=torch.half)
    assert cuda.linear.serves_rows(wide, wide)
    assert not cuda.linear.serves_norm(stream, wide)


@pytest.mark.parametrize(("kilobytes", "most"), [(163, 8192), (99, 5792), (227, 8192)])
def test_normed_rows_fit_into_the_devices_shared_memory(monkeypatch, kilobytes, most):
    """As compute capability 8.0, 8.6, 8.9 and 12.0, and 9.0 and 10.0 have it."""
    asked = []
    monkeypatch.setattr(module, "block_shared_bytes", lambda _: kilobytes << 10)
    weight, stream = torch.zeros(16, most, dtype=torch.half), torch.zeros(8, most)
    assert cuda.linear.serves_norm(stream, weight)
    with launch.using(lambda *given: asked.append(given[-1])):
        cuda.linear.normed_linear(stream, norm_of(most), (weight, None))
    own = max(groups["linear"].shared_bytes for groups in kernel_budget.read_budget().values())
    assert asked[0] + own <= kilobytes << 10
    wide, weight = torch.zeros(1, most + 8), torch.zeros(16, most + 8, dtype=torch.half)
    assert not cuda.linear.serves_norm(wide, weight)
    with pytest.raises(ValueError, match=f"inputs with a norm: at most {most}"):
        cuda.linear.normed_linear(wide, norm_of(most + 8), (weight, None))


@pytest.mark.parametrize(
    ("kilobytes", "rows", "inputs", "blocks"),
    [(163, 8, 4096, 2), (163, 8, 5120, 1), (163, 4, 5120, 2), (227, 8, 5120, 2), (227, 8, 8192, 1)],
)
def test_no_block_waits_for_another_to_end(monkeypatch, kilobytes, rows, inputs, blocks):
    """Of a multiprocessor's two, where its shared memory holds one."""
    asked = []
    monkeypatch.setattr(module, "block_shared_bytes", lambda _: kilobytes << 10)
    monkeypatch.setattr(module, "multiprocessors", lambda _: 3)
    weight = torch.zeros(200, inputs, dtype=torch.half)
    with launch.using(lambda _, grid, *__: asked.append(grid)):
        cuda.linear.normed_linear(torch.zeros(rows, inputs), norm_of(inputs), (weight, None))
        cuda.linear.linear(torch.zeros(rows, inputs, dtype=torch.half), (weight, None))
    assert asked == [(3 * blocks,), (6,)]


X, WEIGHT = torch.zeros(2, 64, dtype=torch.half), torch.zeros(16, 64, dtype=torch.half)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuda.linear.linear(X, (WEIGHT, None), "tanh"), "unknown activation 'tanh'"),
        (lambda: cuda.linear.linear(X.float(), (WEIGHT, None)), "x is float32"),
        (lambda: cuda.linear.linear(X.float(), (WEIGHT.float(), None)), "weight is float32"),
        (lambda: cuda.linear.linear(X[:, :32], (WEIGHT, None)), "x has shape"),
        (lambda: cuda.linear.linear(X.repeat(5, 1), (WEIGHT, None)), "10 rows: at most 8"),
        (lambda: cuda.linear.linear(X[:, :12], (WEIGHT[:, :12].contiguous(), None)), "12 inputs"),
        (
            lambda: cuda.linear.linear(X, (WEIGHT.T.contiguous().T, None)),
            "weight is not contiguous",
        ),
        (lambda: cuda.linear.linear(X, (WEIGHT, WEIGHT[0])), "bias has shape"),
        (lambda: cuda.linear.linear(X, (WEIGHT, None), None, (WEIGHT[:8], None)), "gate has shape"),
        (
            lambda: cuda.linear.linear(X, (WEIGHT, None), following=(WEIGHT[:, :12].contiguous(),)),
            "following: every row",
        ),
        (
            lambda: cuda.linear.linear(X, (WEIGHT, None), following=(WEIGHT, WEIGHT[:8])),
            "following has shape",
        ),
        (lambda: cuda.linear.linear_onto(X.float(), X, (WEIGHT, None)), "residual has shape"),
        (lambda: cuda.linear.linear_onto(X[:, :16], X, (WEIGHT, None)), "residual is float16"),
        (
            lambda: cuda.linear.normed_linear(X.float(), norm_of(32), (WEIGHT, None)),
            "norm has shape",
        ),
        (
            lambda: cuda.linear.normed_linear(
                torch.zeros(1, 8200), norm_of(8200), (torch.zeros(8, 8200).half(), None)
            ),
            "8200 inputs with a norm",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def torch_as_it_starts():
    """torch's own settings of cuBLAS, before and after."""
    products = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = {name: getattr(products, name) for name in names}
    for name in names:
        setattr(products, name, True)
    yield lambda: [getattr(products, name) for name in names]
    for name, value in before.items():
        setattr(products, name, value)


def test_parts_of_sums_are_kept_in_fp32(torch_as_it_starts):
    assert torch_as_it_starts() == [True, True]
    sum_in_fp32()
    assert torch_as_it_starts() == [False, False]


@pytest.mark.gpu
def test_so_they_are_for_every_weight_on_a_gpu(torch_as_it_starts):
    pack_linear(WEIGHT.cuda(), None)
    assert torch_as_it_starts() == [False, False]
