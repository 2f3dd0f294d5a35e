"""Attention of prompt rows to the pages of the cache, against the formula in float64."""

from dataclasses import replace

import pytest
import torch

from nightjar.kernels.cuda.paged_prefill import Span, TileArrays, Tiles, paged_prefill
from nightjar.kernels.layout import Tables
from tests.kernels_cuda.devices import storages
from tests.kernels_cuda.prompt_problems import KEYS, Prompts


@pytest.mark.parametrize("head_size", [64, 80, 96, 128])
@pytest.mark.parametrize("storage", storages)
def test_every_head_size_and_storage(device, head_size, storage):
    Prompts([(0, 3), (30, 45)], 2, 2, head_size, storages[storage]).compare(device)


@pytest.mark.parametrize("storage", ["float16", "float32"])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, KEYS - 1), (0, KEYS), (0, KEYS + 1)],
        [(KEYS - 1, KEYS), (KEYS, KEYS + 1), (2 * KEYS - 1, 2 * KEYS + 2)],
        [(0, 65), (33, 97), (95, 96)],
    ],
    ids=str,
)
def test_chunks_that_begin_and_end_around_tiles_and_blocks(device, spans, storage):
    """Whole prompts, later chunks, cached beginnings, several of them together."""
    Prompts(spans, 1, 1, 64, storages[storage]).compare(device)


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (11, 1), (71, 1)])
def test_query_heads_that_share_key_heads(device, heads, kv_heads, storage):
    """Tiles that begin within a token, and a token of more than one tile."""
    Prompts([(0, 2), (31, 38)], heads, kv_heads, 64, storages[storage]).compare(device)


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_pages_of_other_sizes(device, block_size):
    spans = [(0, 7), (13, 41), (60, 70)]
    for dtype in (torch.bfloat16, torch.float32):
        Prompts(spans, 2, 1, 64, dtype, block_size=block_size).compare(device)


@pytest.mark.parametrize("storage", storages)
def test_scores_that_are_far_apart(device, storage):
    """The maximum of a row rises from tile to tile, and earlier sums almost vanish."""
    problem = Prompts([(90, 100)], 2, 1, 64, storages[storage], spread=6.0)
    problem.compare(device)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("storage", storages)
def test_rows_that_see_the_same_and_rows_that_see_nothing(device, storage, fp8):
    """Documents of three prefixes, of which one is empty: without a mask within a span."""
    spans = [(0, 40), (0, 0), (0, 3)]
    Prompts(spans, 4, 2, 64, storages[storage], causal=False, fp8=fp8).compare(device)


@pytest.mark.parametrize("storage", storages)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(device, heads, kv_heads, storage):
    whole = Prompts([(0, 70)], heads, kv_heads, 64, storages[storage])
    wanted = whole.run(device)
    for cut in (1, 31, 33, 64):
        for start, end in ((0, cut), (cut, 70)):
            part = Prompts([(0, 70)], heads, kv_heads, 64, storages[storage])
            part.spans, part.lengths, part.q = [(start, end)], [end - start], whole.q[start:end]
            assert torch.equal(part.run(device), wanted[start:end])


def test_a_row_has_the_same_bits_in_any_company(device):
    several = Prompts([(0, 37), (20, 90), (4, 5)], 4, 2, 64, torch.float16)
    together = several.run(device)
    alone = several.run(device, tiles=several.tiles(device, slice(1)))
    assert torch.equal(alone[:37], together[:37])


def test_tiles_of_no_work_write_nothing(device):
    """As padding of a recorded step."""
    problem = Prompts([(3, 40)], 2, 1, 64, torch.float16)
    wanted, tiles = problem.run(device), problem.tiles(device)
    none = torch.tensor([[-1, 0], [-1, 64]], dtype=torch.int32, device=device)
    padded = replace(tiles, tiles=torch.cat((none, tiles.tiles, none)))
    assert torch.equal(problem.run(device, tiles=padded), wanted)


def test_tiles_that_see_most_come_first():
    spans = [Span(0, 40, 1), Span(40, 1, 500), Span(41, 70, 31)]
    tables = Tables.build([list(range(16))] * 3)
    tiles = TileArrays.of(tables, spans, [2, 16, 4], 2, 64)
    assert tiles.tiles.tolist() == [[1, 0], [2, 128], [2, 64], [0, 64], [2, 0], [0, 0]]
    assert tiles.spans.tolist() == [[0, 40, 1], [40, 1, 500], [41, 70, 31]]
    assert tiles.tables.shape == (3, 16)
    assert tiles.tables[0].tolist() == [0, 1] + [0] * 14


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": torch.zeros(5, 2, 72)}, "heads of 72 channels"),
        ({"q": torch.zeros(5, 2, 64, dtype=torch.float64)}, "q is float64"),
        ({"q": torch.zeros(5, 2, 66)[..., 2:]}, "multiple of 16 bytes"),
        ({"q": torch.zeros(5, 64, 2).transpose(1, 2)}, "side by side"),
        ({"q": torch.zeros(2, 5, 64).transpose(0, 1)}, "one after another"),
        ({"q": torch.zeros(5, 3, 64)}, "cannot share 2 key heads"),
        ({"keys": torch.zeros(3, 2, 32, 64).half()}, "keys is float16"),
        ({"values": torch.zeros(3, 2, 16, 64)}, "values has shape"),
        ({"keys": torch.zeros(3, 2, 24, 64), "values": torch.zeros(3, 2, 24, 64)}, "power of two"),
        ({"spans": torch.zeros(1, 3)}, "spans is float32"),
        ({"tables": torch.zeros(2, 1, dtype=torch.int32)}, "tables has shape"),
        ({"tiles": torch.zeros(70000, 2, dtype=torch.int32)}, "70000 tiles"),
        ({"lse": torch.zeros(5, 1)}, "lse has shape"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_tensor_is_refused(wrong, message):
    given = {
        "q": torch.zeros(5, 2, 64),
        "keys": torch.zeros(3, 2, 32, 64),
        "values": torch.zeros(3, 2, 32, 64),
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "spans": torch.zeros(1, 3, dtype=torch.int32),
        "tiles": torch.zeros(1, 2, dtype=torch.int32),
        "lse": None,
    } | wrong
    q, keys, values, *tiles, lse = given.values()
    with pytest.raises(ValueError, match=message):
        paged_prefill(q, keys, values, Tiles(*tiles), 1.0, causal=True, lse=lse)
