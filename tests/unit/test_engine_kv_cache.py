"""Blocks: held, shared, resting, reserved, and never more than there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable, prefix_keys


def reserved(pool, tokens, shared=()):
    own = pool.blocks_for(tokens) - len(shared)
    return BlockTable(pool, own, shared) if pool.reserve(own, shared) else None


def published(pool, tokens, salt=0):
    """A table that holds these tokens, made known and let go."""
    keys = prefix_keys(tokens, pool.block_size, salt)
    table = reserved(pool, len(tokens))
    table.grow(len(tokens))
    for block, key in zip(table.blocks, keys, strict=False):
        pool.publish(block, key)
    return table, keys


def test_a_table_draws_as_it_grows():
    pool = BlockPool(10, 4)
    table = reserved(pool, 9)
    assert pool.available == 7
    table.grow(1)
    assert table.blocks == [0]
    table.grow(4)
    assert table.blocks == [0]
    table.grow(9)
    assert table.blocks == [0, 1, 2]
    assert pool.available == 7
    table.free()
    assert pool.available == 10


def test_what_does_not_fit_reserves_nothing():
    pool = BlockPool(3, 4)
    first = reserved(pool, 8)
    assert reserved(pool, 5) is None
    assert pool.available == 1
    first.free()
    assert reserved(pool, 12) is not None


def test_an_unused_reservation_comes_back():
    pool = BlockPool(5, 4)
    table = reserved(pool, 20)
    table.grow(2)
    table.free()
    assert pool.available == 5


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens, blocks):
    assert BlockPool(1, 4).blocks_for(tokens) == blocks


def test_forgotten_prefixes_are_not_found_and_their_blocks_are_free():
    pool = BlockPool(4, 2)
    rested, keys = published(pool, [1, 2, 3, 4])
    rested.free()
    held, more = published(pool, [5, 6])
    pool.forget()
    assert pool.find(keys) == pool.find(more) == []
    assert pool.available == 3
    held.free()
    assert pool.available == 4
    table = reserved(pool, 8)
    table.grow(8)
    assert sorted(table.blocks) == [0, 1, 2, 3]


class NextTier:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def evicted(self, block, key):
        self.told.append((block, key))

    def spoiled(self, key):
        self.told.append(key)

    def forget(self):
        self.told.append("all")


def test_the_next_tier_hears_of_every_prefix_that_a_draw_takes_back():
    tier = NextTier()
    pool = BlockPool(3, 2, tier)
    rested, keys = published(pool, [1, 2, 3, 4])
    blocks = list(rested.blocks)
    rested.free()
    wanted = [(blocks[1], keys[1]), (blocks[0], keys[0])]  # the end of a prefix first
    assert [pool.next_evicted(draws) for draws in (1, 2, 3)] == [[], wanted[:1], wanted]
    table = reserved(pool, 6)
    table.grow(2)
    assert tier.told == []
    table.grow(6)
    assert tier.told == wanted


def test_the_next_tier_hears_of_what_is_spoiled_and_of_a_reset():
    tier = NextTier()
    pool = BlockPool(3, 2, tier)
    table, keys = published(pool, [1, 2, 3, 4, 5])
    pool.taint(table.blocks)
    pool.forget()
    assert tier.told == [*keys, "all"]


def test_keys_tell_all_tokens_before_the_end_of_a_block():
    keys = prefix_keys(list(range(10)), 4, salt=0)
    assert len(keys) == 2
    assert prefix_keys(list(range(8)), 4, salt=0) == keys
    assert prefix_keys([9, *range(1, 8)], 4, salt=0)[1] != keys[1]
    assert prefix_keys([*range(7), 9], 4, salt=0)[0] == keys[0]
    assert prefix_keys(list(range(8)), 4, salt=1)[0] != keys[0]


def test_a_known_prefix_is_found_without_a_gap():
    pool = BlockPool(10, 4)
    table, keys = published(pool, list(range(12)))
    assert pool.find(keys) == table.blocks
    assert pool.find([keys[0], b"other", keys[2]]) == table.blocks[:1]
    assert pool.find([b"other", keys[1]]) == []


def test_resting_blocks_are_shared_again():
    pool = BlockPool(4, 4)
    table, keys = published(pool, list(range(8)))
    table.free()
    assert pool.available == 4
    again = reserved(pool, 12, pool.find(keys))
    assert pool.available == 1
    again.grow(12)
    assert again.blocks[:2] == [0, 1]
    again.free()
    assert (pool.available, pool.find(keys)) == (4, [0, 1])


def test_a_waking_block_is_not_promised_twice():
    pool = BlockPool(3, 4)
    table, keys = published(pool, list(range(8)))
    table.free()
    assert reserved(pool, 16, pool.find(keys)) is None
    assert (pool.available, pool.find(keys)) == (3, [0, 1])


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning():
    pool = BlockPool(4, 4)
    old, old_keys = published(pool, list(range(8)))
    new, new_keys = published(pool, list(range(100, 108)))
    new.free()
    old.free()
    reserved(pool, 8, pool.find(new_keys)).free()  # used again: now the younger one
    other = reserved(pool, 12)
    other.grow(4)
    assert pool.find(old_keys) == [0]
    other.grow(12)
    assert pool.find(old_keys) == []
    assert pool.find(new_keys) == [2]


def test_the_beginning_of_a_block_is_found_by_what_it_ends():
    pool = BlockPool(4, 16)
    assert pool.grain == 8
    keys = prefix_keys(list(range(24)), pool.grain, salt=0)
    table = reserved(pool, 24)
    table.grow(24)
    pool.publish_beginning(0, keys[0])
    pool.publish(0, keys[1])
    pool.publish_beginning(1, keys[2])
    assert pool.find(keys[1::2]) == [0]
    assert pool.find_beginning(keys[:1]) == (0, 0)
    assert pool.find_beginning(keys[2:]) == (1, 0)
    assert pool.find_beginning([keys[2], b"other"]) == (1, 0)
    assert pool.find_beginning([b"other"]) is None
    assert pool.find_beginning([]) is None


def test_a_grain_divides_every_block():
    assert [BlockPool(1, size).grain for size in (1, 2, 12, 24, 32)] == [1, 2, 4, 8, 8]


def with_beginning(pool):
    """A block that is known to its middle alone, let go."""
    (key,) = prefix_keys(list(range(8)), pool.grain, salt=0)
    table = reserved(pool, 8)
    table.grow(8)
    (block,) = table.blocks
    pool.publish_beginning(block, key)
    table.free()
    return block, key


def test_a_block_with_a_known_beginning_rests_until_it_is_needed():
    tier = NextTier()
    pool = BlockPool(2, 16, tier)
    block, key = with_beginning(pool)
    assert pool.available == 2
    table = reserved(pool, 32)
    table.grow(16)
    assert pool.find_beginning([key]) == (block, 0)
    # The next tier keeps whole blocks.
    assert pool.next_evicted(2) == []
    table.grow(32)
    assert pool.find_beginning([key]) is None
    assert tier.told == []
    table.free()
    assert pool.available == 2


@pytest.mark.parametrize("lose", [lambda pool: pool.taint([0]), lambda pool: pool.forget()])
def test_a_beginning_is_lost_with_its_block(lose):
    pool = BlockPool(2, 16)
    _, key = with_beginning(pool)
    lose(pool)
    assert pool.find_beginning([key]) is None
    assert pool.available == 2
    assert with_beginning(pool)[1] == key


def test_a_tainted_block_lets_nobody_find_its_beginning():
    pool = BlockPool(2, 16)
    table = reserved(pool, 16)
    table.grow(16)
    pool.taint(table.blocks)
    pool.publish_beginning(table.blocks[0], b"key")
    assert pool.find_beginning([b"key"]) is None


def test_the_first_carrier_of_a_beginning_stays():
    pool = BlockPool(3, 16)
    first, second = (reserved(pool, 16) for _ in range(2))
    for table in (first, second):
        table.grow(16)
        pool.publish_beginning(table.blocks[0], b"same")
    assert pool.find_beginning([b"same"]) == (first.blocks[0], 0)
    second.free()
    first.free()
    assert pool.available == 3


def test_the_first_carrier_of_a_prefix_stays():
    pool = BlockPool(4, 4)
    first, keys = published(pool, list(range(4)))
    second, _ = published(pool, list(range(4)))
    assert pool.find(keys) == first.blocks
    second.free()
    assert pool.find(keys) == first.blocks
    first.free()
    assert pool.available == 4


def test_tainted_blocks_are_forgotten_and_cleared_before_their_next_use():
    pool = BlockPool(3, 4)
    table, keys = published(pool, list(range(8)))
    pool.taint(table.blocks)
    assert pool.find(keys) == []
    table.free()
    assert pool.available == 3
    reserved(pool, 12).grow(12)
    assert sorted(pool.take_dirty()) == [0, 1]
    assert pool.take_dirty() == []


def test_tainting_what_rests_frees_it():
    pool = BlockPool(2, 4)
    table, keys = published(pool, list(range(8)))
    blocks = list(table.blocks)
    table.free()
    pool.taint(blocks)
    assert (pool.find(keys), pool.available) == ([], 2)


def test_a_tainted_block_that_is_still_held_stays_unknown():
    pool = BlockPool(3, 4)
    table, keys = published(pool, list(range(8)))
    other = reserved(pool, 12, pool.find(keys))
    pool.taint(table.blocks)
    table.free()
    for block, key in zip(other.blocks, keys, strict=True):
        pool.publish(block, key)
    assert pool.find(keys) == []
    other.free()
    assert pool.available == 3
    # Cleared, they can carry a prefix again.
    again, keys = published(pool, list(range(8)))
    assert pool.take_dirty() == again.blocks
    assert pool.find(keys) == again.blocks


def test_a_fork_shares_whole_blocks_and_copies_the_last():
    pool = BlockPool(10, 4)
    assert pool.reserve(7)
    prompt = BlockTable(pool, 7)
    prompt.grow(6)
    first, copy = prompt.fork(6, 2, prompt)
    assert copy == (1, first.blocks[1])
    assert first.blocks[0] == prompt.blocks[0]
    second, _ = prompt.fork(6, 2, prompt)
    prompt.free()
    assert pool.available == 10 - 1 - 2 - 2
    first.grow(9)
    first.free()
    second.free()
    assert pool.available == 10


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    pool = BlockPool(10, 4)
    assert pool.reserve(3)
    prompt = BlockTable(pool, 3)
    prompt.grow(4)
    fork, copy = prompt.fork(4, 1, prompt)
    assert copy is None
    assert fork.blocks == prompt.blocks


class Pool(RuleBasedStateMachine):
    """Tables come, grow, share and go; the pool's books stay right."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.tables = []

    @rule(length=st.integers(1, 12), kind=st.integers(0, 2), grown=st.integers(0, 12))
    def open(self, length, kind, grown):
        tokens = [kind] * length
        keys = prefix_keys(tokens, 2, 0)
        shared = self.pool.find(keys[: (length - 1) // 2])
        table = reserved(self.pool, length, shared)
        if table is None:
            return
        table.grow(max(2 * len(shared), min(length, grown)))
        for block, key in zip(table.blocks, keys, strict=False):
            self.pool.publish(block, key)
        self.tables.append((table, length))

    @rule(which=st.integers(0, 100), taint=st.booleans())
    def close(self, which, taint):
        if self.tables:
            table, _ = self.tables.pop(which % len(self.tables))
            if taint:
                self.pool.taint(table.blocks)
            table.free()

    @rule(which=st.integers(0, 100))
    def grow(self, which):
        if self.tables:
            table, length = self.tables[which % len(self.tables)]
            table.grow(length)

    @invariant()
    def the_books_are_right(self):
        held = {block for table, _ in self.tables for block in table.blocks}
        undrawn = sum(-(-length // 2) - len(table.blocks) for table, length in self.tables)
        assert self.pool.available == 12 - len(held) - undrawn
        assert self.pool.available >= 0

    def teardown(self):
        for table, _ in self.tables:
            table.free()
        assert self.pool.available == 12


TestPool = Pool.TestCase


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_equal_keys_mean_equal_tokens(a, b):
    keys = prefix_keys(a, 2, 0), prefix_keys(b, 2, 0)
    for count, (one, other) in enumerate(zip(*keys, strict=False), 1):
        assert (one == other) == (a[: 2 * count] == b[: 2 * count])
