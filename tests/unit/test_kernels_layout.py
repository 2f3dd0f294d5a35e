"""Plans of a step: every row once, pieces that depend on one sequence alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightjar.kernels import BranchLayout, PagedLayout, RaggedLayout, decode_attention
from nightjar.kernels.layout import padded_length

lengths_of_sequences = st.lists(st.integers(1, 300), min_size=1, max_size=20)


@given(st.integers(1, 100_000))
def test_padded_length_wastes_little(length):
    padded = padded_length(length)
    assert length <= padded < length + (16 if length <= 128 else 64)
    assert padded_length(padded) == padded


@given(lengths_of_sequences)
def test_padding_and_back_is_the_identity(lengths):
    layout = RaggedLayout.build(lengths)
    assert layout.rows == sum(lengths)
    rows = torch.arange(sum(lengths))
    assert torch.equal(torch.cat([rows[g.rows] for g in layout.groups])[layout.unpad], rows)


@given(lengths_of_sequences)
def test_groups_hold_each_sequence_once_from_its_first_row(lengths):
    layout = RaggedLayout.build(lengths)
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
    layout = RaggedLayout.build([3, 3, 3, 20], keys=[1, 0, 1, 1])
    assert [group.members.tolist() for group in layout.groups] == [[1], [0, 2], [3]]


def test_branches_read_their_own_query():
    layout = BranchLayout.build([2, 2, 30], [1, 0, 1], [[7], [4, 9]], [5, 40])
    groups = [
        (group.members.tolist(), blocks.tolist(), length)
        for group, (blocks, length) in zip(layout.shared.groups, layout.prefixes, strict=True)
    ]
    assert groups == [([1], [7], 5), ([0], [4, 9], 40), ([2], [4, 9], 40)]


def test_blocks_in_ascending_order_longest_sequences_first():
    layout = PagedLayout.build([[5], [3, 8, 2], [1, 6]], [4, 9, 5], 4)
    assert layout.counts == (3, 2, 1)
    assert layout.owners.tolist() == [0, 1, 2, 0, 1, 0]
    assert layout.steps.tolist() == [0, 0, 0, 1, 1, 2]
    assert layout.inverse.tolist() == [2, 0, 1]
    assert (layout.mask == 0).sum(1).tolist() == [4, 4, 4, 4, 1, 1]


def test_blocks_that_lie_together_are_read_in_place():
    near = PagedLayout.build([[5], [3, 8]], [4, 8], 4)
    assert near.pages == slice(3, 9)
    assert near.places.tolist() == [0, 2, 5]
    assert near.page_rows[[0, 2, 5]].tolist() == [1, 0, 1]
    far = PagedLayout.build([[5], [3, 80]], [4, 8], 4)
    assert far.pages.tolist() == [3, 5, 80]
    assert far.page_rows.tolist() == [1, 0, 1]


@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_where_the_blocks_lie_changes_no_bit(poison):
    """In place or gathered, whatever stands in the blocks of others."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 16, generator=generator)
    pages = torch.randn(2, 6, 2, 8, 16, generator=generator)
    lengths, near, far = [8, 24, 13], [[4], [1, 6, 3], [5, 2]], [[90], [7, 50, 3], [70, 20]]
    results = []
    for tables in (near, far):
        cache = torch.full((2, 100, 2, 8, 16), poison)
        cache[:, [block for table in tables for block in table]] = pages
        layout = PagedLayout.build(tables, lengths, 8)
        results.append(decode_attention(q, *cache, layout, 0.2))
    assert torch.equal(*results)
    assert results[0].isfinite().all()
