"""A cache in FP8 on a GPU: what is written, and attention to what the cache keeps."""

import pytest
import torch

from nightjar.kernels import (
    Branch,
    BranchLayout,
    CacheScales,
    CacheWrite,
    Chunk,
    ChunkLayout,
    HeadNorms,
    PagedLayout,
    StepRows,
    cuda,
    ops,
    reference,
)
from nightjar.kernels.cuda import decode_attention as module
from nightjar.kernels.cuda.decode_attention import SPLIT
from nightjar.kernels.reference.fp8_rows import dequantised, quantised
from tests import fp8
from tests.cuda_host import schedule
from tests.kernels_cuda.decode_problems import Problem, Step, rotation_for
from tests.kernels_cuda.devices import assert_near, moved, random, storages
from tests.kernels_cuda.prompt_problems import WEIGHT_ERRORS

HEAD_SIZES = [64, 80, 96, 128]
BLOCKS, BLOCK_SIZE = 4, 16


def empty_cache(heads, head_size, rows):
    """Bytes of nobody, and where the first rows go."""
    shape = (BLOCKS, heads, BLOCK_SIZE, head_size)
    keys, values = (torch.full(shape, 77, dtype=torch.uint8) for _ in range(2))
    scales = CacheScales(*(torch.full(shape[:-1], 255, dtype=torch.uint8) for _ in range(2)))
    places = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:rows]
    return CacheWrite(keys, values, places // BLOCK_SIZE, places % BLOCK_SIZE, scales)


def written(device, qkv, query_heads, cache, norms=None, rotation=None):
    """The rows and the cache after `qkv_post`."""
    got, records = qkv.clone().to(device), [moved(x, device) for x in (norms, rotation, cache)]
    cuda.qkv_post.qkv_post(got, query_heads, *records)
    return got.cpu(), moved(records[2], "cpu")


def assert_kept(cache, k, v):
    """The cache holds these rows, byte for byte as the definition quantises them."""
    places = cache.blocks, slice(None), cache.offsets
    n = cache.blocks.shape[0]
    of_keys, of_values = (cache.keys, cache.scales.keys), (cache.values, cache.scales.values)
    for (codes, exponents), rows in ((of_keys, k[:n]), (of_values, v[:n])):
        flat = rows.double().reshape(-1, rows.shape[-1]).numpy()
        expected = [fp8.quantised(row) for row in flat]
        found = codes[places].reshape(len(flat), -1), exponents[places].flatten()
        for index, (code, exponent) in enumerate(expected):
            assert found[1][index] == exponent, flat[index]
            assert found[0][index].tolist() == code.tolist(), flat[index]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("storage", storages)
def test_codes_and_scales_are_those_of_the_definition(device, head_size, storage):
    dtype, rows, kv_heads = storages[storage], 9, 2
    qkv = random((rows, 3 + 2 * kv_heads, head_size), dtype)
    spread = 2.0 ** torch.randint(-9, 10, qkv.shape, generator=torch.Generator().manual_seed(4))
    qkv[4:] *= spread[4:].to(dtype)  # numbers that are subnormal beside the largest
    qkv[2], qkv[3] = 0.0, torch.tensor(448.0)
    cache = empty_cache(kv_heads, head_size, rows - 2)
    got, cache = written(device, qkv, 3, cache)
    assert_kept(cache, qkv[:, 3 : 3 + kv_heads], qkv[:, 3 + kv_heads :])
    expected = qkv.clone()
    kept = dequantised(*quantised(qkv[: rows - 2, 3:]), dtype)
    expected[: rows - 2, 3:] = kept
    assert torch.equal(got, expected)  # in place; documents' rows and queries stay


@pytest.mark.parametrize("storage", storages)
def test_edges_of_codes_and_scales(device, storage):
    """Ties, the largest number, numbers below the least code, and rows at the ends of the range."""
    dtype = storages[storage]
    qkv = torch.zeros(9, 3, 64, dtype=dtype)
    edges = torch.tensor([1.0625, 1.1875, -0.0009765625, 0.0029296875, 0.0146484375, 0.015625, 0.0])
    for row, peak in enumerate((448.0, 449.0, 224.0, 225.0, 240.0, 464.0, 1.0, 2.0**-14, 65504.0)):
        qkv[row, 1:, 0] = peak
        qkv[row, 1:, 1:8] = edges.to(dtype)
        qkv[row, 1:, 8:15] = edges.to(dtype) * peak / 448
    if dtype != torch.float16:
        qkv[7, 1:] *= 2.0**-120
        qkv[8, 1:] *= 2.0**100
    _, cache = written(device, qkv, 1, empty_cache(1, 64, 9))
    assert_kept(cache, qkv[:, 1:2], qkv[:, 2:])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_throughout(device, wrong):
    qkv = random((3, 3, 64), torch.bfloat16)
    qkv[1, 1, 17] = wrong
    got, cache = written(device, qkv, 1, empty_cache(1, 64, 3))
    assert got[1, 1].isnan().all()
    assert got[1, 2].isfinite().all()
    assert_kept(cache, qkv[:, 1:2], qkv[:, 2:])


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_heads_are_normalised_and_turned_before_they_are_quantised(device, head_size):
    norms = HeadNorms(random(head_size, seed=4), random(head_size, seed=5), 1e-6)
    qkv, rotation = random((4, 8, head_size), torch.float16), rotation_for(4, head_size // 2)
    plain = qkv.clone().to(device)
    cuda.qkv_post.qkv_post(plain, 4, moved(norms, device), moved(rotation, device))
    got, cache = written(device, qkv, 4, empty_cache(2, head_size, 4), norms, rotation)
    assert_kept(cache, plain.cpu()[:, 4:6], plain.cpu()[:, 6:])
    assert torch.equal(got[:, :4], plain.cpu()[:, :4])


def test_places_without_a_sequence_write_nothing_and_round_nothing(device):
    qkv, cache = random((3, 3, 64), torch.float16), empty_cache(1, 64, 3)
    cache.blocks[1] = -1
    got, after = written(device, qkv, 1, cache)
    assert torch.equal(got[1], qkv[1])
    assert (after.scales.keys != 255).sum() == (after.scales.values != 255).sum() == 2


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("storage", storages)
def test_decode_attends_to_what_the_cache_keeps(device, storage, head_size, heads):
    """By rows and by tensor cores, around the operands of the latter and the parts of warps."""
    lengths = [1, 15, 17, 32, 33, SPLIT - 1, SPLIT + 16, 2 * SPLIT + 49, 0]
    kv_heads = 2 if heads == 2 else 1
    problem = Problem(lengths, heads, kv_heads, head_size, storages[storage], width=12, fp8=True)
    lse = torch.full((len(lengths), heads), float("nan"), device=device)
    out, wanted = problem.run(device, lse=lse), problem.wanted()
    assert_near(out, wanted[0], absolute=2e-5)
    assert_near(lse, wanted[1], absolute=1e-4)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("storage", storages)
def test_rows_of_very_different_scales(device, storage, heads):
    """Values of 2 ** -12 beside values of 2 ** 12, of which the small ones weigh nearly all."""
    dtype = storages[storage]
    problem = Problem([96], heads, 1, 64, dtype, fp8=True)
    scores = problem.own_keys[0][:, 0] @ problem.q.double()[0, 0] * problem.scale
    values = torch.where(scores.argsort().argsort() < 8, 2.0**12, 2.0**-12)[:, None, None]
    values = values * random((96, 1, 64)).sign() * (1 + 0.4 * random((96, 1, 64), seed=3).sigmoid())
    codes, exponents = quantised(values.to(dtype))
    places = torch.arange(96)
    blocks = torch.tensor(problem.block_tables[0])[places // 32], places % 32
    problem.values[blocks[0], :, blocks[1]] = codes
    problem.scales.values[blocks[0], :, blocks[1]] = exponents
    problem.own_values[0] = fp8.kept(values.to(dtype))
    assert_near(problem.run(device), problem.wanted()[0], absolute=5e-4)


@pytest.mark.parametrize("heads", [1, 4])
def test_weights_lose_nothing_in_tensor_cores(device, heads):
    """Small values that nearly cancel out: rounded weights would be far off, and so would weights
    that are multiplied by a small scale before they are rounded to 16 bits."""
    problem = Problem([96], heads, 1, 64, torch.float16, fp8=True)
    scores = problem.own_keys[0][:, 0] @ problem.q.double()[0, 0] * problem.scale
    weights = scores.softmax(0)
    values, balance, small = torch.empty(96, 1, 64, dtype=torch.float64), 0.0, 2.0**-12
    for i in weights.argsort(descending=True).tolist():
        size = 96.0 * 2.0 ** (i % 3) * small
        values[i] = -size if balance > 0 else size
        balance += float(weights[i] * values[i, 0, 0])
    places = torch.arange(96)
    blocks, offsets = torch.tensor(problem.block_tables[0])[places // 32], places % 32
    codes, exponents = quantised(values.half())
    problem.values[blocks, :, offsets], problem.scales.values[blocks, :, offsets] = codes, exponents
    problem.own_values[0] = values
    found, wanted = problem.run(device)[0, 0].double().cpu(), problem.wanted()[0][0, 0]
    assert wanted.abs().max() < small
    assert (found - wanted).abs().max() < 2e-3 * small


@pytest.mark.parametrize("heads", [1, 4])
def test_a_cached_row_that_is_nan_reaches_every_channel(device, heads):
    for name in ("keys", "values"):
        problem = Problem([40, 40], heads, 1, 64, torch.float16, fp8=True)
        getattr(problem.scales, name)[problem.block_tables[1][0], 0, 5] = 255
        out = problem.run(device)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


def test_a_row_has_the_same_bits_in_any_company(device):
    for heads in (1, 4):
        wide = Problem([100, 300, 1], heads, 1, 64, torch.float16, fp8=True)
        together = wide.run(device)
        for row in range(3):
            assert torch.equal(wide.run(device, slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", [[1, 0, 31], [SPLIT, SPLIT + 33, 2 * SPLIT + 1]])
def test_what_is_asked_for_ahead_changes_nothing(device, monkeypatch, lengths, heads):
    problem = Problem(lengths, heads, 1, 64, torch.float16, width=40, fp8=True)
    found = []
    for blocks in (0, 10**6):
        monkeypatch.setattr(module, "RESIDENT_BLOCKS", blocks)
        found.append(problem.run(device))
    assert torch.equal(*found)


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("storage", storages)
def test_heads_are_finished_on_the_way(device, storage, head_size, heads):
    """The bits of `qkv_post` and the attention after it, and of the cache."""
    lengths, kv_heads = [SPLIT + 1, 0, 40, 1], 2
    shape = lengths, heads, kv_heads, head_size, storages[storage]
    step = Step(Problem(*shape, width=12, fp8=True), norms=True, turned=head_size // 2)
    step.compare(device)


@pytest.mark.parametrize("seed", range(1, 5))
def test_no_schedule_shows_a_race_or_changes_a_bit(device, seed):
    for heads in (1, 4):
        problem = Problem([130, 0, 31], heads, 1, 64, torch.float16, fp8=True)
        step = Step(problem, norms=True, turned=20)
        first, stepped = problem.run(device), step.run(device)[0]
        with schedule(seed):
            assert torch.equal(problem.run(device), first)
            assert torch.equal(step.run(device)[0], stepped)


@pytest.mark.parametrize("storage", storages)
def test_a_prompt_whole_in_chunks_or_after_a_cached_prefix(device, storage):
    """Of a layer: the same keys and values, and the same result up to the rounding of weights."""
    dtype, length, table = storages[storage], 40, [2, 0, 1]
    qkv = random((length, 4 + 2 * 2, 64), dtype)

    def attend(*cuts):
        cache = moved(empty_cache(2, 64, 0), device)
        outs = []
        for start, end in zip((0, *cuts), (*cuts, length), strict=True):
            positions = torch.arange(start, end)
            places = torch.tensor(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
            write = CacheWrite(
                cache.keys, cache.values, *(x.to(device) for x in places), cache.scales
            )
            rows = StepRows(ChunkLayout.build([Chunk(table, start, end)], BLOCK_SIZE), None, None)
            given = qkv[start:end].clone().to(device)
            outs.append(ops.attend(given, None, None, write, rows, 0.125))
        return torch.cat(outs).cpu(), moved(cache, "cpu")

    k, v = (fp8.kept(x) for x in (qkv[:, 4:6], qkv[:, 6:]))
    rounded = WEIGHT_ERRORS[dtype] * float(v.abs().max())
    whole, cached = attend()
    for cut in (1, 16, 23):
        found, other = attend(cut)
        assert_near(found, whole.double(), absolute=rounded)
        assert torch.equal(other.keys, cached.keys)
        assert torch.equal(other.values, cached.values)
        assert torch.equal(other.scales.keys, cached.scales.keys)
        assert torch.equal(other.scales.values, cached.scales.values)
    scores = torch.einsum("qhd,khd->hqk", qkv[:, :4].double(), k.repeat_interleave(2, 1)) * 0.125
    scores.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    assert_near(whole, wanted, ulps=16, absolute=1e-5)


def test_a_step_of_prompts_running_sequences_and_documents(device):
    """As the reference computes it, with the same bytes in the cache."""
    size, dtype = 64, torch.float32
    rows = StepRows(
        ChunkLayout.build([Chunk([0], 0, 5)], BLOCK_SIZE),
        PagedLayout.build([[1, 2]], [BLOCK_SIZE + 2], BLOCK_SIZE),
        BranchLayout.build([Branch(3, 16, 0), Branch(2, 16, 0)], [[3]], [9]),
    )
    earlier = quantised(random((BLOCKS, 1, BLOCK_SIZE, size), seed=8))
    qkv = random((5 + 1 + 5, 2 + 2, size), dtype)
    blocks, offsets = torch.tensor([0] * 5 + [2]), torch.tensor([0, 1, 2, 3, 4, 1])

    def attend(attend_by, where):
        codes = [earlier[0].clone() for _ in range(2)]
        scales = CacheScales(*(earlier[1].clone() for _ in range(2)))
        cache = moved(CacheWrite(*codes, blocks, offsets, scales), where)
        given = qkv.clone().to(where)
        return attend_by(given, None, None, cache, rows, 0.125).cpu(), moved(cache, "cpu")

    found, cache = attend(ops.attend, device)
    wanted, expected = attend(reference.attention.attend, "cpu")
    assert_near(found, wanted.double(), ulps=32, absolute=1e-5)
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.scales.values, expected.scales.values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "keys is uint8: give float32"),
        ({"keys": torch.ones(3, 2, 32, 64)}, "keys is float32: give uint8"),
        (
            {"scales": CacheScales(*(torch.ones(3, 2, 16, dtype=torch.uint8) for _ in "kv"))},
            "scales of keys has shape",
        ),
    ],
)
def test_bad_arguments_are_named(change, message):
    codes = torch.ones(3, 2, 32, 64, dtype=torch.uint8)
    exponents = torch.ones(3, 2, 32, dtype=torch.uint8)
    given = {
        "q": torch.ones(2, 4, 64),
        "keys": codes,
        "values": codes,
        "block_tables": torch.ones(2, 1, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
        "scales": CacheScales(exponents, exponents),
    }
    with pytest.raises(ValueError, match=message):
        cuda.decode_attention.decode_attention(**(given | change))
