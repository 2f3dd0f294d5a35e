"""Plans of a step: every row once, pieces that depend on one sequence alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightjar.kernels import Branch, BranchLayout, Chunk, ChunkLayout, PagedLayout, decode_attention
from nightjar.kernels.layout import padded_length
from nightjar.kernels.reference.plans import BlockPlan, BranchPlan, Pages, RaggedPlan, TilePlan

lengths_of_sequences = st.lists(st.integers(1, 300), min_size=1, max_size=20)


def ragged(lengths, keys=None):
    return RaggedPlan.build(lengths, [padded_length(length) for length in lengths], keys)


@given(st.integers(1, 100_000))
def test_padded_length_wastes_little(length):
    padded = padded_length(length)
    assert length <= padded < length + (16 if length <= 128 else 64)
    assert padded_length(padded) == padded


@given(lengths_of_sequences)
def test_padding_and_back_is_the_identity(lengths):
    layout = ragged(lengths)
    rows = torch.arange(sum(lengths))
    assert torch.equal(torch.cat([rows[g.rows] for g in layout.groups])[layout.unpad], rows)


@given(lengths_of_sequences)
def test_groups_hold_each_sequence_once_from_its_first_row(lengths):
    layout = ragged(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = []
    for group in layout.groups:
        for index, rows in zip(group.members, group.rows.view(-1, group.padded), strict=True):
            length = lengths[index]
            assert padded_length(length) == group.padded
            assert rows[:length].tolist() == list(range(starts[index], starts[index] + length))
            assert (rows[length:] == starts[index] + length - 1).all()
            seen.append(int(index))
    assert sorted(seen) == list(range(len(lengths)))


def test_keys_keep_sequences_apart():
    layout = ragged([3, 3, 3, 20], keys=[1, 0, 1, 1])
    assert [group.members.tolist() for group in layout.groups] == [[1], [0, 2], [3]]


def test_branches_read_their_own_prefix():
    branches = [Branch(2, 16, 1), Branch(2, 16, 0), Branch(30, 32, 1)]
    plan = BranchPlan.of(BranchLayout.build(branches, [[7], [4, 9]], [5, 40]))
    groups = [
        (group.members.tolist(), blocks.tolist(), length)
        for group, (blocks, length) in zip(plan.shared.groups, plan.prefixes, strict=True)
    ]
    assert groups == [([1], [7], 5), ([0], [4, 9], 40), ([2], [4, 9], 40)]


chunks = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=9)


@given(chunks, st.sampled_from([1, 4, 16]))
def test_tiles_hold_every_row_once_at_its_position(parts, size):
    tables, block = [], 0
    for start, count in parts:
        needed = -(-(start + count) // size)
        tables.append(list(range(block, block + needed)))
        block += needed
    layout = ChunkLayout.build(
        [Chunk(t, start, start + n) for t, (start, n) in zip(tables, parts, strict=True)], size
    )
    positions = torch.cat([torch.arange(start, start + n) for start, n in parts])
    owners = torch.cat([torch.full((n,), i) for i, (_, n) in enumerate(parts)])
    assert layout.rows == len(positions)
    plan = TilePlan.of(layout)
    tiles = torch.cat([group.rows.flatten() for group in plan.groups])
    assert torch.equal(tiles[plan.unpad], torch.arange(layout.rows))
    for group in plan.groups:
        tables_of_group = group.blocks.view(group.n, -1).tolist()
        for tile, rows in enumerate(group.rows.view(-1, group.n, size), group.first):
            for member, table in zip(rows, tables_of_group, strict=True):
                (owner,) = set(owners[member].tolist())
                assert tables[owner][: len(table)] == table
                assert len(table) == -(-(sum(parts[owner])) // size)
                for place, row in enumerate(member.tolist()):
                    position = tile * size + place
                    start, count = parts[owner]
                    if start <= position < start + count:
                        assert positions[row] == position


def test_blocks_in_ascending_order_longest_sequences_first():
    plan = BlockPlan.of(PagedLayout.build([[5], [3, 8, 2], [1, 6]], [4, 9, 5], 4))
    assert plan.counts == (3, 2, 1)
    assert plan.owners.tolist() == [0, 1, 2, 0, 1, 0]
    assert plan.steps.tolist() == [0, 0, 0, 1, 1, 2]
    assert plan.inverse.tolist() == [2, 0, 1]
    assert (~plan.hidden).sum(1).tolist() == [4, 4, 4, 4, 1, 1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80))
def test_every_reading_of_a_block_has_a_page_of_its_own(blocks):
    pages, places = Pages.plan(np.array(blocks))
    read = [block for low, high in pages.runs for block in range(low, high)]
    read += pages.singles.tolist()
    assert len(read) == pages.count
    assert [read[place] for place in places] == blocks
    assert len(set(places.tolist())) == len(blocks)


def test_blocks_that_lie_together_are_read_in_place():
    near, places = Pages.plan(np.array([3, 4, 5, 8, 40, 41, 42, 43, 4]))
    assert near.runs == ((3, 9), (40, 44))
    assert near.singles.tolist() == [4]
    assert places.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    far, places = Pages.plan(np.array([5, 30, 80]))
    assert (far.runs, far.singles.tolist(), places.tolist()) == ((), [5, 30, 80], [0, 1, 2])


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_where_the_blocks_lie_changes_no_bit(poison):
    """In place or gathered, shared or not, whatever stands in the blocks of others."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 16, generator=generator)
    pages = torch.randn(2, 6, 2, 8, 16, generator=generator)
    pages[:, 4] = pages[:, 1]
    lengths = [8, 24, 13]
    results = []
    for tables in (
        [[4], [1, 6, 3], [5, 2]],
        [[90], [7, 50, 3], [70, 20]],
        [[4], [1, 6, 3], [1, 2]],
    ):
        cache = torch.full((2, 100, 2, 8, 16), poison)
        cache[:, [block for table in tables for block in table]] = pages
        layout = PagedLayout.build(tables, lengths, 8)
        results.append(decode_attention(q, *cache, layout, 0.2))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert results[0].isfinite().all()
