import pytest
import torch

from nightjar import kernels
from nightjar.kernels import (
    CacheWrite,
    PagedLayout,
    cuda,
    reference,
)
from nightjar.kernels.cuda import decode_attention as module
from nightjar.kernels.cuda.decode_attention import SPLIT
from tests.cuda_host import schedule
from tests.kernels_cuda.decode_problems import BLOCK_SIZE, Problem, Step
from tests.kernels_cuda.devices import assert_near, storages


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_every_head_size_and_storage(device, head_size, storage):
    problem = Problem([3, 40], 2, 2, head_size, storages[storage])
    assert_near(problem.run(device), problem.wanted()[0], absolute=2e-5)


@pytest.mark.parametrize("length", [0, 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT])
def test_lengths_around_the_split(device, length):
    problem = Problem([length, 5], 1, 1, 64, torch.float16, width=12)
    lse = torch.full((2, 1), float("nan"), device=device)
    out, wanted_lse = problem.run(device, lse=lse), problem.wanted()[1]
    assert_near(out, problem.wanted()[0], absolute=2e-5)
    assert_near(lse, wanted_lse, absolute=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 1), (8, 2), (7, 1), (8, 1), (11, 1)])
def test_query_heads_that_share_key_heads(device, heads, kv_heads):
    """One block for up to 8 heads, idle places in it, and more than one block."""
    for dtype in (torch.float16, torch.float32):
        problem = Problem([33, 2], heads, kv_heads, 64, dtype)
        assert_near(problem.run(device), problem.wanted()[0], absolute=2e-5)


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_shared_key_heads_of_every_size_and_storage(device, storage, head_size, heads):
    """Texts that end around the operands of tensor cores, and around the parts of warps."""
    lengths = [1, 15, 17, 32, 33, SPLIT - 1, SPLIT + 16, 2 * SPLIT + 49]
    problem = Problem(lengths, heads, 1, head_size, storages[storage], width=12)
    lse = torch.full((len(lengths), heads), float("nan"), device=device)
    out, wanted = problem.run(device, lse=lse), problem.wanted()
    assert_near(out, wanted[0], absolute=2e-5)
    assert_near(lse, wanted[1], absolute=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_lose_nothing_in_tensor_cores(device, dtype):
    """Values that nearly cancel out: weights rounded to 16 bits would be off by 3e-3 and 2e-2."""
    problem = Problem([96], 4, 1, 64, dtype)
    scores = problem.own_keys[0][:, 0] @ problem.q.double()[0, 0] * problem.scale
    weights = scores.softmax(0)
    values, balance = torch.empty(96, 1, 64, dtype=torch.float64), 0.0
    for i in weights.argsort(descending=True).tolist():
        values[i] = -100.0 if balance > 0 else 100.0
        balance += float(weights[i] * values[i, 0, 0])
    problem.own_values[0] = values
    places = torch.arange(96)
    blocks = torch.tensor(problem.block_tables[0])[places // BLOCK_SIZE]
    keys = problem.own_keys[0].to(dtype)
    written = values.to(dtype), blocks, places % BLOCK_SIZE
    kernels.kv_write(problem.keys, problem.values, keys, *written)
    found, wanted = problem.run(device)[0, 0].double().cpu(), problem.wanted()[0][0, 0]
    assert wanted.abs().max() < 0.1
    assert (found - wanted).abs().max() < 5e-4


def test_the_reference_agrees(device):
    problem = Problem([140, 7, 64], 4, 2, 64, torch.float32, width=6)
    tables = [
        table[: -(-length // BLOCK_SIZE)]
        for table, length in zip(problem.block_tables, problem.lengths, strict=True)
    ]
    layout = PagedLayout.build(tables, problem.lengths, BLOCK_SIZE)
    clean = (x.nan_to_num() for x in (problem.keys, problem.values))
    wanted = reference.decode.decode_attention(problem.q, *clean, layout, problem.scale)
    assert_near(problem.run(device), wanted, ulps=16, absolute=1e-5)


def test_a_row_has_the_same_bits_in_any_company(device):
    """Alone or among others, and however wide the table is: one split or several."""
    wide = Problem([100, 300, 1], 2, 1, 64, torch.float16)
    together = wide.run(device)
    for row in range(3):
        assert torch.equal(wide.run(device, slice(row, row + 1))[0], together[row])
    narrow = Problem([100], 2, 1, 64, torch.float16, seed=3)
    alone = Problem([100], 2, 1, 64, torch.float16, width=9, seed=3)
    assert torch.equal(narrow.run(device), alone.run(device))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_splits_of_every_head_size_and_storage_are_merged(device, head_size, storage):
    """Texts of none, one, two and three splits, in a table that is wider still."""
    lengths = [SPLIT + 1, 0, 2 * SPLIT + 7, 9]
    problem = Problem(lengths, 2, 2, head_size, storages[storage], width=24)
    lse = torch.full((4, 2), float("nan"), device=device)
    out, wanted = problem.run(device, lse=lse), problem.wanted()
    assert_near(out, wanted[0], absolute=2e-5)
    assert_near(lse, wanted[1], absolute=1e-4)


@pytest.mark.parametrize("splits", [8, 9, 33])
def test_more_splits_than_are_asked_for_or_weighed_at_once(device, splits):
    problem = Problem([splits * SPLIT - 5, 3 * SPLIT], 1, 1, 64, torch.float16)
    lse = torch.full((2, 1), float("nan"), device=device)
    out, wanted = problem.run(device, lse=lse), problem.wanted()
    assert_near(out, wanted[0], absolute=2e-5)
    assert_near(lse, wanted[1], absolute=1e-4)


def test_every_launch_leaves_its_counts_at_zero_for_the_next(device):
    """Heads in two blocks, of which each has a last one."""
    problem = Problem([3 * SPLIT, 2 * SPLIT, 5, 0], 11, 1, 64, torch.float16)
    first = problem.run(device)
    for _ in range(2):
        assert torch.equal(problem.run(device), first)
    counts = module._arrivals(torch.zeros(1, device=device).get_device(), 8)
    assert not counts.any()


@pytest.mark.parametrize("blocks", [2, 4, 1000])
def test_blocks_of_several_splits_give_the_same_bits(device, monkeypatch, blocks):
    """However many blocks share the splits: one of a row, two, as many as there are."""
    problem = Problem([5 * SPLIT + 3, 0, SPLIT], 4, 2, 64, torch.float16, width=40)
    lse = torch.full((3, 4), float("nan"), device=device)
    monkeypatch.setattr(module, "BLOCKS_PER_MULTIPROCESSOR", 6)
    monkeypatch.setattr(module, "multiprocessors", lambda _: 1)
    one = problem.run(device, lse=lse)
    assert_near(one, problem.wanted()[0], absolute=2e-5)
    assert_near(lse, problem.wanted()[1], absolute=1e-4)
    monkeypatch.setattr(module, "BLOCKS_PER_MULTIPROCESSOR", blocks * 6)
    assert torch.equal(problem.run(device), one)


@pytest.mark.parametrize("lengths", [[1, 0, 31], [SPLIT, SPLIT + 33, 2 * SPLIT + 1], [1100, 9]])
def test_what_is_asked_for_ahead_changes_nothing(device, monkeypatch, lengths):
    """On the host, what lies outside of the cache is a fault, and so is a table past a text."""
    problem = Problem(lengths, 4, 2, 64, torch.float16, width=40)
    step = Step(problem, turned=32)
    found = []
    for blocks in (0, 10**6):
        monkeypatch.setattr(module, "RESIDENT_BLOCKS", blocks)
        found.append((problem.run(device), step.run(device)[0]))
    assert all(map(torch.equal, *found))
    assert_near(found[0][0], problem.wanted()[0], absolute=2e-5)


def test_large_scores_do_not_overflow(device):
    problem = Problem([60], 1, 1, 64, torch.float16)
    problem.q *= 300
    assert_near(problem.run(device), problem.wanted()[0], absolute=1e-3)


@pytest.mark.parametrize("seed", range(1, 9))
def test_no_schedule_shows_a_race_or_changes_a_bit(device, seed):
    problem = Problem([130, 0, 31], 4, 1, 64, torch.float16)
    first = problem.run(device)
    with schedule(seed):
        assert torch.equal(problem.run(device), first)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_heads_are_finished_on_the_way(device, head_size, storage):
    """Norms, rotation and the cache write, for texts of no, one and two splits: the bits of
    `qkv_post` and the attention after it, both of which have a reference of their own."""
    problem = Problem([SPLIT + 1, 0, 40, 1], 2, 2, head_size, storages[storage], width=12)
    Step(problem, norms=True, turned=head_size // 2).compare(device)


@pytest.mark.parametrize("length", [1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT])
def test_the_newest_position_is_written_before_it_is_read(device, length):
    problem = Problem([length, 5], 1, 1, 64, torch.float16, width=12)
    Step(problem).compare(device)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 1), (8, 2), (7, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("turned", [0, 5, 32])
def test_shared_key_heads_are_written_once(device, heads, kv_heads, turned):
    """A race, if two blocks did it."""
    problem = Problem([33, 2], heads, kv_heads, 64, torch.float16)
    Step(problem, norms=turned == 5, turned=turned).compare(device)


@pytest.mark.parametrize("blocks", [1, 2, 3, 1000])
def test_whichever_block_has_the_newest_position_writes_it(device, monkeypatch, blocks):
    problem = Problem([5 * SPLIT + 3, 0, SPLIT], 4, 2, 64, torch.float16, width=40)
    monkeypatch.setattr(module, "BLOCKS_PER_MULTIPROCESSOR", blocks * 6)
    monkeypatch.setattr(module, "multiprocessors", lambda _: 1)
    Step(problem, turned=32).compare(device)


def test_a_finished_row_has_the_same_bits_in_any_company(device):
    step = Step(Problem([100, 300, 1], 2, 1, 64, torch.float16), norms=True, turned=32)
    together, _ = step.run(device)
    for row in range(3):
        assert torch.equal(step.run(device, slice(row, row + 1))[0][0], together[row])


@pytest.mark.parametrize("seed", range(1, 5))
def test_no_schedule_shows_a_race_of_finished_heads(device, seed):
    step = Step(Problem([130, 0, 31], 4, 1, 64, torch.float16), norms=True, turned=20)
    first, _ = step.run(device)
    with schedule(seed):
        assert torch.equal(step.run(device)[0], first)


@pytest.mark.parametrize(
    ("shape", "places", "message"),
    [
        ((2, 20, 64), 2, "18 query heads share 1 key heads"),
        ((2, 4, 64), 1, "1 rows are to be cached of 2"),
        ((2, 2, 64), 2, "2 heads are not 0 query heads"),
        ((2, 4, 72), 2, "heads of 72 channels"),
    ],
)
def test_heads_that_cannot_be_finished_are_named(shape, places, message):
    keys, values = (torch.ones(3, 1, 32, shape[2]) for _ in range(2))
    zeros = torch.zeros(places, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        cuda.decode_attention.decode_heads(
            torch.ones(shape),
            None,
            None,
            CacheWrite(keys, values, zeros, zeros),
            torch.ones(2, 1, dtype=torch.int32),
            torch.ones(2, dtype=torch.int32),
            1.0,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(2, 4, 72)}, "heads of 72 channels"),
        ({"q": torch.ones(2, 3, 64)}, "cannot share 2 key heads"),
        ({"q": torch.ones(2, 64, 4).transpose(1, 2)}, "side by side"),
        ({"q": torch.ones(2, 4 * 64 + 2)[:, :256].view(2, 4, 64)}, "multiple of 16 bytes"),
        ({"keys": torch.ones(3, 2, 24, 64), "values": torch.ones(3, 2, 24, 64)}, "power of two"),
        ({"values": torch.ones(3, 2, 32, 64).half()}, "values is float16"),
        ({"block_tables": torch.ones(2, 1, dtype=torch.int64)}, "block_tables is int64"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths has shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {
        "q": torch.ones(2, 4, 64),
        "keys": torch.ones(3, 2, 32, 64),
        "values": torch.ones(3, 2, 32, 64),
        "block_tables": torch.ones(2, 1, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        cuda.decode_attention.decode_attention(**(given | change))


def test_a_cache_of_more_rows_than_32_bits_count_is_refused():
    cache = torch.empty(2**26, 1, 32, 64, device="meta")
    q, tables, lengths = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((2, 4, 64), torch.float32), ((2, 1), torch.int32), (2, torch.int32))
    )
    with pytest.raises(ValueError, match="a cache of 2147483648 rows"):
        cuda.decode_attention.decode_attention(q, cache, cache, tables, lengths, 1.0)
