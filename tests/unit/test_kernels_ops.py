"""Embedding, norm, products and log-probabilities against plain formulas."""

import pytest
import torch

from nightjar import kernels
from nightjar.kernels import log_prob
from nightjar.kernels.ops import target_nll
from nightjar.kernels.reference.linear import FloatWeight
from tests.backends import BACKENDS, use_backend


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def test_embed_reads_table_positions_and_each_rows_own_vectors():
    table, position_table = torch.randn(10, 6), torch.randn(5, 6)
    vectors = torch.randn(4, 6)
    ids = torch.tensor([3, 10, 11, 9, 10])
    positions = torch.tensor([0, 1, 2, 3, 4])
    bases = torch.tensor([0, 0, 0, 2, 2])
    x = kernels.embed(ids, positions, table, position_table, vectors, bases)
    rows = torch.stack((table[3], vectors[0], vectors[1], table[9], vectors[2]))
    assert torch.equal(x, rows + position_table)


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("hidden", [1, 17, 768])
def test_embed_reads_a_row_of_each_table(hidden, scale):
    table, position_table = torch.randn(50, hidden), torch.randn(9, hidden)
    ids, positions = torch.randint(0, 50, (200,)), torch.randint(0, 9, (200,))
    x = kernels.embed(ids, positions, table, position_table, scale=scale)
    assert torch.equal(x, table[ids] * scale + position_table[positions])
    assert torch.equal(kernels.embed(ids, positions, table, None, scale=scale), table[ids] * scale)


def test_embed_reads_no_row_that_a_table_has_not():
    table, ids = torch.randn(5, 16), torch.tensor([4, 0, 1, 2])
    with pytest.raises(IndexError):
        kernels.embed(ids, torch.tensor([0, 1, 2, 0]), table, torch.randn(2, 16))
    with pytest.raises(IndexError):
        kernels.embed(torch.tensor([4, -1]), torch.tensor([0, 1]), table, None)
    with pytest.raises((ValueError, RuntimeError)):  # whose places are too few, or too narrow
        kernels.embed(ids, torch.tensor([0, 1, 2]), table, torch.randn(5, 16))
    with pytest.raises((ValueError, RuntimeError)):
        kernels.embed(ids, ids, table, torch.randn(5, 15))


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_an_id_past_an_lm_head_is_named(backend):
    assert backend == "native"
    table = torch.randn(50, 16)
    one = kernels.tied_table(table, kernels.pack_linear(table, None))
    with pytest.raises(IndexError, match="id 55: the table has 50 rows"):
        kernels.embed(torch.tensor([1, 55, 2]), torch.arange(3), one, None)


def test_embed_keeps_the_stream_in_fp32():
    table, position_table = torch.randn(10, 6).bfloat16(), torch.randn(5, 6).bfloat16()
    x = kernels.embed(torch.tensor([1]), torch.tensor([2]), table, position_table)
    assert x.dtype == torch.float32
    assert torch.equal(x[0], table[1].float() + position_table[2].float())


@pytest.mark.parametrize(("vocab_size", "hidden"), [(10, 6), (96, 17), (500, 64)])
def test_embed_reads_an_lm_head_as_it_reads_the_table(vocab_size, hidden):
    table, positions_table = torch.randn(vocab_size, hidden), torch.randn(40, hidden)
    vectors, ids = torch.randn(4, hidden), torch.randint(0, vocab_size, (40,))
    ids[3], ids[4], ids[9], ids[10] = vocab_size, vocab_size + 1, vocab_size - 1, vocab_size + 1
    positions, bases = torch.arange(40).flip(0), torch.zeros(40, dtype=torch.int64)
    bases[10] = 2
    arguments = positions, positions_table, vectors, bases, 1.5
    expected = kernels.embed(ids, arguments[0], table, *arguments[1:])
    one = kernels.tied_table(table, kernels.pack_linear(table, None))
    assert torch.equal(kernels.embed(ids, arguments[0], one, *arguments[1:]), expected)
    plain = ids.clamp(max=vocab_size - 1)
    assert torch.equal(kernels.embed(plain, positions, one, None), table[plain])


def test_a_head_of_another_dtype_is_no_table():
    table = torch.randn(10, 6)
    assert kernels.tied_table(table, kernels.pack_linear(table, None, "int8")) is table
    half = table.bfloat16()
    assert kernels.tied_table(half, kernels.pack_linear(half, None)) is half


@pytest.mark.parametrize("hidden", [1, 111, 500])
def test_layer_norm_adds_then_normalises(hidden):
    residual, delta = torch.randn(7, hidden), torch.randn(7, hidden)
    weight, bias = torch.randn(hidden), torch.randn(hidden)
    stream = (residual + delta).double()
    out = kernels.layer_norm(residual, delta, weight, bias, 1e-5, torch.float32)
    assert torch.equal(residual.double(), stream)
    deviation = (stream.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    expected = (stream - stream.mean(-1, keepdim=True)) / deviation * weight + bias
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_embed_scales_table_rows_and_vectors_alike():
    table, vectors = torch.randn(10, 6), torch.randn(4, 6)
    ids, bases = torch.tensor([3, 12]), torch.tensor([0, 0])
    x = kernels.embed(ids, ids, table, None, vectors, bases, 2.5)
    assert torch.equal(x, torch.stack((table[3], vectors[2])) * 2.5)


@pytest.mark.parametrize("hidden", [1, 111, 500])
def test_rms_norm_adds_then_normalises(hidden):
    residual, delta = torch.randn(7, hidden), torch.randn(7, hidden)
    weight = torch.randn(hidden)
    stream = (residual + delta).double()
    out = kernels.rms_norm(residual, delta, weight, 1e-5, torch.float32)
    assert torch.equal(residual.double(), stream)
    expected = stream / (stream.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_heads_keeps_what_it_reads():
    heads = torch.randn(5, 9, 80).bfloat16()
    before = heads.clone()
    out = kernels.rms_norm(heads[:, 2:7], None, torch.ones(80), 1e-6, torch.bfloat16)
    assert torch.equal(heads, before)
    expected = before[:, 2:7].float()
    expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("hidden", [1, 80, 111, 4097, 32_767])
def test_rms_norm_rows_do_not_depend_on_how_many_there_are(hidden):
    x, weight = torch.randn(65, hidden), torch.randn(hidden)
    whole = kernels.rms_norm(x, None, weight, 1e-6, torch.float32)
    for rows in (1, 2, 3, 4, 7, 16, 33, 48):
        found = kernels.rms_norm(x[17 : 17 + rows], None, weight, 1e-6, torch.float32)
        assert torch.equal(found, whole[17 : 17 + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "turned"), [(2, 2), (80, 20), (96, 96), (11, 4)])
def test_rotary_turns_pairs_by_their_angles(dtype, size, turned):
    x = torch.randn(5, 3, size).to(dtype)
    angles = torch.rand(5, turned // 2, dtype=torch.float64) * 100
    found = x.clone()
    kernels.rotary(found, angles.cos().float(), angles.sin().float())
    n = turned // 2
    pairs = torch.complex(x[..., :n].double(), x[..., n:turned].double())
    pairs *= torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((pairs.real, pairs.imag, x[..., turned:].double()), -1)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[..., turned:], x[..., turned:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_of_many_rows_is_that_of_each(dtype):
    x, angles = torch.randn(700, 5, 24).to(dtype), torch.rand(700, 12) * 100
    alone, cosines, sines = x.clone(), angles.cos(), angles.sin()
    kernels.rotary(x, cosines, sines)
    for row in (0, 1, 545, 546, 547, 699):
        one = slice(row, row + 1)
        kernels.rotary(alone[one], cosines[one], sines[one])
        assert torch.equal(alone[one], x[one])


def test_rotary_turns_a_part_of_a_tensor_in_place():
    x = torch.randn(4, 6, 8)
    before, quarter = x.clone(), torch.full((4, 4), torch.pi / 2)
    kernels.rotary(x[:, :5], quarter.cos(), quarter.sin())
    assert torch.equal(x[:, 5], before[:, 5])
    torch.testing.assert_close(x[:, :5, 4:], before[:, :5, :4], atol=1e-6, rtol=0)
    torch.testing.assert_close(x[:, :5, :4], -before[:, :5, 4:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "outputs"), [(30, 77), (64, 192), (768, 256), (512, 2048)])
def test_linear_rows_do_not_depend_on_how_many_there_are(dtype, features, outputs):
    weight = torch.randn(outputs, features).to(dtype)
    packed = kernels.pack_linear(weight, torch.randn(outputs).to(dtype))
    x = torch.randn(300, features).to(dtype)
    whole = kernels.linear(x, packed)
    for rows in (1, 2, 3, 4, 5, 7, 16, 31, 33, 64, 100, 129, 256):
        assert torch.equal(kernels.linear(x[17 : 17 + rows], packed), whole[17 : 17 + rows])


@pytest.mark.parametrize("rows", [1, 19, 99])
def test_linear_equals_the_product(rows):
    weight, bias, x = torch.randn(111, 50), torch.randn(111), torch.randn(rows, 100)[:, ::2]
    found = kernels.linear(x, kernels.pack_linear(weight, bias))
    expected = x.double() @ weight.T.double() + bias
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "silu"])
def test_linear_runs_through_the_activation(kind):
    weight, bias, x = torch.randn(37, 50), torch.randn(37), torch.randn(9, 50)
    expected = kernels.activation(x @ weight.T + bias, kind)
    packed = kernels.pack_linear(weight, bias)
    plain = FloatWeight(37, weight, bias, packed=False)
    for form in (packed, plain):
        found = kernels.linear(x, form, kind)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_gated_pair_is_a_product_of_two():
    gate, up, x = torch.randn(37, 50), torch.randn(37, 50), torch.randn(9, 50)
    bias = torch.randn(37)
    packed = kernels.pack_gated((gate, None), (up, bias))
    found = kernels.linear(x, packed, "silu").double()
    gate, up, x, bias = (each.double() for each in (gate, up, x, bias))
    opened, widened = torch.nn.functional.silu(x @ gate.T), x @ up.T + bias
    # The rounding of a sum goes with its terms: 50 products may cancel, and the other factor may
    # be large. silu rises by 1.1 at most.
    terms = [x.abs() @ weight.abs().T for weight in (gate, up)]
    rounding = 1.1 * terms[0] * widened.abs() + opened.abs() * (terms[1] + bias.abs())
    assert (found - opened * widened).abs().le(1e-6 + 8 * 2.0**-24 * rounding).all()


def test_activations_and_their_names():
    x = torch.linspace(-6, 6, 101)
    cubic = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    expected = 0.5 * x * (1 + torch.tanh(cubic))
    torch.testing.assert_close(kernels.activation(x, "gelu_tanh"), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(kernels.activation(x, "relu"), x.clamp(min=0))
    with pytest.raises(ValueError, match="tanh"):
        kernels.activation(x, "tanh")


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("vocab", [5, 70_000])
def test_token_nll_over_several_chunks(rows, vocab):
    hidden, weight = torch.randn(rows, 16), torch.randn(vocab, 16)
    sources = torch.randint(0, rows, (2 * rows + 1,)).sort().values
    targets = torch.randint(0, vocab, sources.shape)
    found = kernels.token_nll(hidden, kernels.pack_linear(weight, None), sources, targets)
    log_probs = (hidden.double() @ weight.T.double()).log_softmax(-1)
    torch.testing.assert_close(found.double(), -log_probs[sources, targets], atol=1e-4, rtol=1e-5)


def test_token_nll_never_holds_the_scores_of_all_rows(monkeypatch):
    held, linear = [], log_prob.linear

    def seen(x, head):
        scores = linear(x, head)
        held.append(scores.numel() * 4)
        return scores

    monkeypatch.setattr(log_prob, "linear", seen)
    hidden, head = torch.randn(2000, 4), kernels.pack_linear(torch.randn(5000, 4), None)
    rows = torch.arange(2000)
    kernels.token_nll(hidden, head, rows, rows)
    assert sum(held) == 4 * 2000 * 5000
    assert max(held) <= log_prob.CHUNK_BYTES


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1024, 1499])
def test_token_nll_tells_a_score_that_is_not_finite_wherever_it_is(place, value):
    """Nothing is predicted to be that token."""
    weight = torch.randn(1500, 4)
    head = kernels.pack_linear(weight, torch.zeros(1500))
    hidden, targets = torch.randn(3, 4), torch.tensor([7, 8, 9])
    scores = kernels.linear(hidden, head)
    scores[1, place] = value
    found = target_nll(scores, torch.arange(3), targets)
    assert found.isnan().tolist() == [False, True, False]


def test_token_nll_of_huge_scores_is_finite():
    head = kernels.pack_linear(torch.tensor([[1e4], [-1e4]]), None)
    targets = torch.tensor([0, 1])
    found = kernels.token_nll(torch.ones(1, 1), head, torch.tensor([0, 0]), targets)
    assert found.tolist() == [0.0, 2e4]


def test_token_nll_of_nothing():
    head = kernels.pack_linear(torch.randn(5, 3), None)
    nothing = torch.empty(0, dtype=torch.int64)
    assert kernels.token_nll(torch.empty(0, 3), head, nothing, nothing).shape == (0,)
