import pytest
import torch

from nightjar import kernels
from nightjar.kernels import CacheWrite, HeadNorms, cuda
from tests.kernels_cuda.decode_problems import CONTEXT, rotation_for
from tests.kernels_cuda.devices import assert_near, moved, poisoned, random, storages

BLOCKS, BLOCK_SIZE = 5, 4


def cache_for(heads, head_size, dtype, rows):
    keys, values = (poisoned((BLOCKS, heads, BLOCK_SIZE, head_size), dtype) for _ in range(2))
    places = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:rows]
    return CacheWrite(keys, values, places // BLOCK_SIZE, places % BLOCK_SIZE)


def reference(qkv, query_heads, norms, rotation, cache):
    """The torch ops one after another, in float64."""
    kv_heads = (qkv.shape[1] - query_heads) // 2
    wide = qkv.double()
    q, k, v = wide.split([query_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        for part, weight in ((q, norms.query), (k, norms.key)):
            size = (part.square().mean(-1, keepdim=True) + norms.epsilon).sqrt()
            part.copy_(part / size * weight.double())
    if rotation is not None:
        angles = (x.double()[rotation.positions] for x in (rotation.cosines, rotation.sines))
        kernels.rotary(wide[:, : query_heads + kv_heads], *angles)
    keys = values = None
    if cache is not None:
        keys, values = cache.keys.double(), cache.values.double()
        n = cache.blocks.shape[0]
        kernels.kv_write(keys, values, k[:n], v[:n], cache.blocks, cache.offsets)
    return wide, keys, values


def compare(device, qkv, query_heads, norms=None, rotation=None, cache=None):
    wanted, keys, values = reference(qkv, query_heads, norms, rotation, cache)
    got = qkv.to(device)
    records = [moved(x, device) for x in (norms, rotation, cache)]
    cuda.qkv_post.qkv_post(got, query_heads, *records)
    assert_near(got, wanted, absolute=1e-5)
    if cache is not None:
        assert_near(records[2].keys, keys, absolute=1e-5)
        assert_near(records[2].values, values, absolute=1e-5)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_rotation_and_cache_of_every_head_size(device, head_size, storage):
    dtype = storages[storage]
    rows, query_heads, kv_heads = 5, 3, 1
    heads = query_heads + 2 * kv_heads
    qkv = random((rows, heads, head_size), dtype)
    cache = cache_for(kv_heads, head_size, dtype, rows)
    compare(device, qkv, query_heads, None, rotation_for(rows, head_size // 2), cache)


def test_norms_of_queries_and_keys_come_before_the_rotation(device):
    norms = HeadNorms(random(64, seed=4), random(64, seed=5), 1e-6)
    qkv = random((4, 8, 64), torch.bfloat16)
    compare(device, qkv, 4, norms, rotation_for(4, 32), cache_for(2, 64, torch.bfloat16, 4))


@pytest.mark.parametrize("n", [1, 8, 20, 40])
def test_channels_past_the_turned_ones_are_kept(device, n):
    """GPT-NeoX turns a part of each head; n may be odd or reach over lanes."""
    qkv = random((3, 4, 80))
    compare(device, qkv, 2, None, rotation_for(3, n))


def test_learned_positions_need_the_cache_write_alone(device):
    qkv = random((4, 6, 64), torch.float16)
    before = qkv.clone()
    compare(device, qkv, 2, cache=cache_for(2, 64, torch.float16, 4))
    given, cache = qkv.to(device), moved(cache_for(2, 64, torch.float16, 4), device)
    cuda.qkv_post.qkv_post(given, 2, cache=cache)
    assert torch.equal(given.cpu(), before)


def test_rows_of_documents_are_turned_and_not_cached(device):
    qkv = random((6, 3, 64), torch.float16)
    compare(device, qkv, 1, None, rotation_for(6, 32), cache_for(1, 64, torch.float16, 2))


def test_places_without_a_sequence_write_nothing(device):
    qkv = random((3, 3, 64), torch.float16)
    cache = cache_for(1, 64, torch.float16, 3)
    cache.blocks[1] = -1
    given = moved(cache, device)
    cuda.qkv_post.qkv_post(qkv.to(device), 1, cache=given)
    written = (~given.keys.isnan()).any(-1).any(1).sum()
    assert written == 2


def test_a_position_outside_the_table_is_nan_for_its_row_alone(device):
    rotation = rotation_for(3, 32)
    rotation.positions[1] = CONTEXT
    qkv = random((3, 3, 64), torch.float16).to(device)
    cuda.qkv_post.qkv_post(qkv, 1, rotation=moved(rotation, device))
    assert qkv[1, :2].isnan().all()
    assert qkv[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qkv": torch.ones(2, 3, 72)}, "heads of 72 channels"),
        ({"qkv": torch.ones(2, 4, 64)}, "4 heads are not 1 query heads"),
        ({"qkv": torch.ones(2, 64, 3).transpose(1, 2)}, "not contiguous"),
        ({"rotation": rotation_for(3, 32)}, "positions has shape"),
        ({"rotation": rotation_for(2, 33)}, "66 channels"),
        ({"cache": cache_for(1, 64, torch.float16, 2)}, "keys is float16"),
        ({"cache": cache_for(1, 64, torch.float32, 3)}, "3 rows are to be cached"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cuda.qkv_post.qkv_post(**({"qkv": torch.ones(2, 3, 64), "query_heads": 1} | arguments))


def test_more_heads_than_32_bits_count_are_refused():
    with pytest.raises(ValueError, match="give fewer rows"):
        cuda.qkv_post.qkv_post(torch.empty(2**31 // 3, 3, 64, device="meta"), 1)
