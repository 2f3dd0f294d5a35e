"""Attention of prompt rows to the pages of the cache, against the formula in float64."""

from dataclasses import replace

import pytest
import torch

from nightjar import kernels
from nightjar.kernels.cuda.paged_prefill import TILE_ROWS, Span, TileArrays, Tiles, paged_prefill
from nightjar.kernels.layout import Tables
from tests.kernels_cuda.devices import assert_near, poisoned, random, storages

KEYS = 32  # positions of a tile of keys, as in prompt_rows.cuh


class Prompts:
    """Rows of sequences in a paged cache, and what each of them sees.

    spans: the positions [start, end) of each sequence's rows; all before them are cached too.  What
    lies past the ends is NaN.  causal: a row sees everything up to itself; else it sees `end`.
    """

    def __init__(
        self, spans, heads, kv_heads, head_size, dtype, *, causal=True, spread=1.0, block_size=KEYS
    ):
        self.spans, self.heads, self.kv_heads, self.causal = spans, heads, kv_heads, causal
        self.block_size = block_size
        counts = [-(-end // block_size) for _, end in spans]
        blocks = sum(counts) + 2
        shuffled = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        shape = (blocks, kv_heads, block_size, head_size)
        self.keys, self.values = (poisoned(shape, dtype) for _ in range(2))
        self.own, self.tables = [], []
        for i, ((_, end), count) in enumerate(zip(spans, counts, strict=True)):
            table = [shuffled.pop() for _ in range(count)]
            k, v = (random((end, kv_heads, head_size), dtype, seed=9 * i + j) for j in (1, 2))
            places = torch.arange(end)
            rows = torch.tensor(table, dtype=torch.int64)[places // block_size]
            kernels.kv_write(self.keys, self.values, k, v, rows, places % block_size)
            self.own.append((k.double(), v.double()))
            self.tables.append(table)
        lengths = [end - start for start, end in spans] if causal else [5] * len(spans)
        packed = random((sum(lengths), heads + 2 * kv_heads, head_size), dtype, seed=5)
        self.q = (packed * spread)[:, :heads]
        self.lengths, self.scale = lengths, head_size**-0.5

    def tiles(self, device, chosen=slice(None)):
        """Of some sequences, whose rows then come first in q."""
        spans, first = [], 0
        for (start, end), rows in zip(self.spans[chosen], self.lengths[chosen], strict=True):
            spans.append(Span(first, rows, start + 1 if self.causal else end))
            first += rows
        widths = [len(table) for table in self.tables[chosen]]
        shared, rows = self.heads // self.kv_heads, TILE_ROWS[self.q.dtype]
        tables = Tables.build(self.tables[chosen])
        return TileArrays.of(tables, spans, widths, shared, rows).on(torch.device(device))

    def run(self, device, lse=None, tiles=None):
        tiles = tiles or self.tiles(device)
        given = [x.to(device) for x in (self.q, self.keys, self.values)]
        return paged_prefill(*given, tiles, self.scale, causal=self.causal, lse=lse)

    def wanted(self):
        """In float64: [T, H, D], and the log-sum-exp of the scores [T, H]."""
        outs, lses, shared = [], [], self.heads // self.kv_heads
        for q, (k, v), (start, end) in zip(
            self.q.double().split(self.lengths), self.own, self.spans, strict=True
        ):
            wide_k, wide_v = (x.repeat_interleave(shared, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->qhk", q, wide_k) * self.scale
            if self.causal:
                hidden = torch.arange(end)[None] > torch.arange(start, end)[:, None]
                scores.masked_fill_(hidden[:, None], float("-inf"))
            outs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1), wide_v).nan_to_num())
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses)

    def compare(self, device):
        lse = torch.full(self.q.shape[:2], float("nan"), device=device)
        out, (wanted, wanted_lse) = self.run(device, lse), self.wanted()
        # Weights are multiplied in 16 bits: each is off by half an epsilon, and no sum by more.
        half = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2e-6}[self.q.dtype]
        largest = max((float(v.abs().max()) for _, v in self.own if len(v)), default=0.0)
        assert_near(out, wanted, absolute=half * largest)
        assert_near(lse, wanted_lse, absolute=max(half, 1e-5) * 1.5)


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


@pytest.mark.parametrize("storage", storages)
def test_rows_that_see_the_same_and_rows_that_see_nothing(device, storage):
    """Documents of three prefixes, of which one is empty: without a mask within a span."""
    Prompts([(0, 40), (0, 0), (0, 3)], 4, 2, 64, storages[storage], causal=False).compare(device)


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
