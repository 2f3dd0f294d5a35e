"""Blocks: held, reserved, free, and never more than there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable


def test_a_table_draws_as_it_grows():
    pool = BlockPool(10, 4)
    table = BlockTable.reserve(pool, 9)
    assert pool.available == 7
    table.grow(1)
    assert table.blocks == [0]
    table.grow(4)
    assert table.blocks == [0]
    table.grow(9)
    assert table.blocks == [0, 1, 2]
    assert pool.available == 7
    assert pool.take_fresh() == [0, 1, 2]
    assert pool.take_fresh() == []
    table.free()
    assert pool.available == 10


def test_what_does_not_fit_reserves_nothing():
    pool = BlockPool(3, 4)
    first = BlockTable.reserve(pool, 8)
    assert BlockTable.reserve(pool, 5) is None
    assert pool.available == 1
    first.free()
    assert BlockTable.reserve(pool, 12) is not None


def test_an_unused_reservation_comes_back():
    pool = BlockPool(5, 4)
    table = BlockTable.reserve(pool, 20)
    table.grow(2)
    table.free()
    assert pool.available == 5


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), max_size=40))
def test_no_block_has_two_owners(steps):
    pool = BlockPool(12, 4)
    tables = []
    for most, used, free_first in steps:
        if free_first and tables:
            tables.pop(0).free()
        table = BlockTable.reserve(pool, most)
        if table is not None:
            table.grow(min(most, used))
            tables.append(table)
        held = [block for t in tables for block in t.blocks]
        assert len(held) == len(set(held))
        assert pool.available >= 0
    for table in tables:
        table.free()
    assert pool.available == 12


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens, blocks):
    assert BlockPool(1, 4).blocks_for(tokens) == blocks
